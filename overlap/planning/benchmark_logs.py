"""Logs of benchmarks as rows: nccl-tests, nccom-test, and our own.

Rows here have the bytes of the whole vector (the larger one of a rank's input and output) and seconds. Where a tool
prints a bandwidth, it is computed again from size and time, so that a log in other units is noticed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ..collectives.generators import GENERATORS
from ..cost.parameters import itemsize_of
from ..errors import UsageError
from ..units import format_bytes

_OPERATIONS = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "allr": "all_reduce",
    "all_gather": "all_gather", "allgather": "all_gather", "allg": "all_gather",
    "reduce_scatter": "reduce_scatter", "reducescatter": "reduce_scatter", "redsct": "reduce_scatter",
    "alltoall": "all_to_all", "all2all": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "bcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip
_COLLECTIVES = ", ".join(sorted(set(_OPERATIONS.values())))
_DTYPES = {
    "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16",
    "double": "float64",
}  # fmt: skip
# A number with a sign, a fraction or a unit, where a row begins with whole bytes; other lines are not rows.
_NO_SIZE = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?[kKMGT]?i?[bB]?")
# Largest relative difference of a printed bandwidth from size over time: both are printed with four digits.
_CLOSE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One measured collective."""

    collective: str  # its name
    nbytes: int  # of the whole vector
    dtype: str  # of the elements
    ranks: int | None  # that took part; None if the log does not say it
    time_s: float  # of one operation
    where: str  # file and line
    # of each rank, its host, from 0, and its device there; none if the log does not say it.
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLog:
    """A benchmark's output."""

    tool: str  # that wrote it
    rows: tuple[LogRow, ...]  # in the order of the file
    dropped: tuple[str, ...] = ()  # why rows were left out


def read(path: str, *, op: str | None = None, ranks: int | None = None) -> BenchmarkLog:
    """Read a log.

    Args:
        path: Path of the file.
        op: The collective, where the log does not say it.
        ranks: That took part, where the log does not say it.

    Raises:
        UsageError: In one line, naming the file, the row and what was expected.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}; "
            "name the log of a benchmark"
        ) from None
    name = Path(path).name
    if op is not None and op.lower().removesuffix("_perf") not in _OPERATIONS:
        raise UsageError(f"--op: expected one of {_COLLECTIVES}, got {op!r}")
    if text.lstrip().startswith("{"):
        return _ours(text, name)
    lines = list(enumerate(text.splitlines(), 1))
    for sign, parse in _TOOLS:
        if sign.search(text):
            found = parse(_Context(name=name, op=op, ranks=ranks), lines)
            return found if found.dropped else replace(found, dropped=_missing(found.rows))
    raise UsageError(f"{name}: expected the output of nccl-tests, nccom-test or `overlap bench --json`")


def _missing(rows: Sequence[LogRow]) -> tuple[str, ...]:
    """Return a remark for each size that a sweep by one factor leaves out."""
    pairs = [(a, b) for a, b in pairwise(rows) if (a.collective, a.dtype) == (b.collective, b.dtype)]
    steps = Counter(b.nbytes / a.nbytes for a, b in pairs)
    usual, seen = steps.most_common(1)[0] if steps else (1.0, 0)
    if usual <= 1 or 2 * seen < len(pairs):
        return ()
    return tuple(
        f"{b.where}: expected {format_bytes(round(a.nbytes * usual))} after {format_bytes(a.nbytes)}, found "
        f"{format_bytes(b.nbytes)}: rows are missing"
        for a, b in pairs
        if b.nbytes > a.nbytes * usual
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    name: str
    op: str | None
    ranks: int | None

    def fail(self, line: int, expected: str, found: str) -> UsageError:
        return UsageError(f"{self.name}:{line}: expected {expected}, found {found.strip()!r}")

    def collective(self, said: str | None) -> str:
        name = (said or self.op or "").lower().removesuffix("_perf")
        if name not in _OPERATIONS:
            raise UsageError(f"{self.name}: says no collective that is known; give --collective, one of {_COLLECTIVES}")
        return _OPERATIONS[name]

    def number(self, text: str, line: int, meaning: str, *, least: float = 0.0) -> float:
        try:
            value = float(text)
        except ValueError:
            raise self.fail(line, meaning, text) from None
        if not value > least or value == float("inf"):
            raise self.fail(line, f"{meaning}, more than {least:g}", text)
        return value

    def is_row(self, words: Sequence[str], number: int, line: str) -> bool:
        """Return whether a line is a row, and not something else that a job printed."""
        if not words or words[0].isdigit():
            return bool(words)
        if _NO_SIZE.fullmatch(words[0]) and len(words) > 1:
            raise self.fail(number, "a size in whole bytes", line)
        return False

    def dtype(self, name: object, where: str) -> str:
        told = str(name).lower()
        found = _DTYPES.get(told, told)
        try:
            itemsize_of(found)
        except UsageError:
            raise UsageError(f"{where}: expected a dtype such as float or bfloat16, found {str(name)!r}") from None
        return found

    def check(self, line: int, nbytes: float, time_s: float, printed: str, units: Sequence[float]) -> None:
        """Refuse a bandwidth that does not follow from size and time in any of the units it may have."""
        rate = self.number(printed, line, "a bandwidth")
        exact = [nbytes / time_s / unit for unit in units]
        rounding = 0.006 / rate  # of two digits
        if all(abs(rate / each - 1) > _CLOSE + rounding for each in exact):
            raise self.fail(line, f"a bandwidth of {exact[0]:.4g} GB/s ({nbytes:g} bytes in {time_s:g} s)", printed)

    def check_count(self, line: int, row: LogRow, count: str, dtype: str) -> None:
        """Refuse elements that do not make up the bytes, of all ranks or of one."""
        nbytes = self.number(count, line, "elements") * itemsize_of(row.dtype)
        if row.nbytes not in (nbytes, nbytes * (row.ranks or 1)) and row.nbytes % nbytes:
            raise self.fail(
                line, f"{row.nbytes // itemsize_of(row.dtype)} elements of {dtype} in {row.nbytes} B", count
            )


_Lines = Sequence[tuple[int, str]]


def _nccl(context: _Context, lines: _Lines) -> BenchmarkLog:
    found = re.search(r"starting: (\w+)", "\n".join(line for _, line in lines))
    collective = context.collective(found[1] if found else None)
    told, places = _places([line for _, line in lines])
    ranks = told or context.ranks
    if context.ranks not in (None, ranks):
        raise UsageError(f"--ranks: {context.name} says that {ranks} took part, got {context.ranks}; leave it out")
    rows, dropped = [], []
    for number, line in lines:
        words = line.split()
        if re.match(r"#\s+\(", line) and not set(re.findall(r"\(\S*?\)", line)) <= _NCCL_UNITS:
            raise context.fail(number, " ".join(sorted(_NCCL_UNITS)), line)
        if line.startswith("#") or not context.is_row(words, number, line):
            continue
        if len(words) < 9:
            raise context.fail(number, "size count type redop root time algbw busbw #wrong", line)
        size, time_us = (
            context.number(words[0], number, "bytes", least=-1),
            context.number(words[5], number, "microseconds"),
        )
        if not size:
            continue
        context.check(number, size, time_us / 1e6, words[6], (1e9,))
        if words[8] not in ("0", "N/A"):
            dropped.append(f"{context.name}:{number}: {words[8]} wrong results")
            continue
        row = _row(context, number, collective, size, words[2], ranks, time_us / 1e6)
        context.check_count(number, row, words[1], words[2])
        rows.append(replace(row, places=places))
    if not any(line.startswith("# Avg bus bandwidth") for _, line in lines):
        dropped.append(f"{context.name}: ends before its average bus bandwidth, so rows may be missing")
    return BenchmarkLog(tool="nccl-tests", rows=tuple(rows), dropped=tuple(dropped))


_NCCL_UNITS = frozenset({"(B)", "(elements)", "(us)", "(GB/s)"})


_RANK = re.compile(r"#\s+Rank\s+\d+(?:.*?\bon\s+(\S+)\s+device\s+(\d+))?")


def _places(lines: Sequence[str]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return how many ranks there are, and if all lines say it, where each is: its host, as they come, and device."""
    found = [match for line in lines if (match := _RANK.match(line))]
    if not all(match[1] for match in found):
        return len(found), ()
    hosts: dict[str, int] = {}
    return len(found), tuple((hosts.setdefault(match[1], len(hosts)), int(match[2])) for match in found)


def _nccom(context: _Context, lines: _Lines) -> BenchmarkLog:
    collective, columns, rows, dropped = context.collective(None), list[str](), [], []
    for number, line in lines:
        if "size(B)" in line:
            columns = re.findall(r"\S+\(us\)|\S+", line)
        words = line.split()
        if not columns or not context.is_row(words, number, line):
            continue
        if "Failure" in line:
            dropped.append(f"{context.name}:{number}: {' '.join(words[1:4])}")
            continue
        if len(words) < len(columns):
            raise context.fail(number, " ".join(columns), line)
        value = dict(zip(columns, words, strict=False))
        time = next((name for name in columns if name.startswith("time")), "")
        if not time.endswith("(us)"):
            raise context.fail(number, "a column of times in (us)", time or line)
        size, time_us = context.number(words[0], number, "bytes"), context.number(value[time], number, "microseconds")
        if "algbw(GB/s)" in value:
            context.check(number, size, time_us / 1e6, value["algbw(GB/s)"], (1e9, 2.0**30))
        rows.append(_row(context, number, collective, size, value.get("type", "fp32"), context.ranks, time_us / 1e6))
    return BenchmarkLog(tool="nccom-test", rows=tuple(rows), dropped=tuple(dropped))


def _ours(text: str, name: str) -> BenchmarkLog:
    context = _Context(name=name, op=None, ranks=None)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: expected JSON of `overlap bench --json`, found no JSON") from None
    found = document.get("rows") if isinstance(document, Mapping) else None
    if not isinstance(found, list):
        raise UsageError(f"{name}: expected JSON of `overlap bench --json`, with rows")
    rows, dropped = [], []
    for number, row in enumerate(found):
        try:
            operation, size, dtype, ranks, time_ns = (
                row[key] for key in ("operation", "size_bytes", "dtype", "ranks", "median_ns")
            )
            if row["wrong"]:
                dropped.append(f"{name}: row {number}: {row['wrong']} wrong results")
                continue
        except (KeyError, TypeError) as error:
            raise UsageError(f"{name}: row {number}: expected {error} beside the others") from None
        if _OPERATIONS.get(str(operation).lower()) in GENERATORS:
            context.dtype(dtype, f"{name}: row {number}")
            nbytes, nanos = (_positive(told, what, f"{name}: row {number}") for told, what in (
                (size, "size_bytes"), (time_ns, "median_ns")))  # fmt: skip
            rows.append(_row(context, number, context.collective(operation), nbytes, dtype, ranks, nanos / 1e9))
    return BenchmarkLog(tool="overlap bench", rows=tuple(rows), dropped=tuple(dropped))


def _positive(value: object, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{where}: expected {name} to be a number, more than 0, found {value!r}")
    return float(value)


def _row(
    context: _Context, line: int, collective: str, nbytes: float, dtype: str, ranks: int | None, time_s: float
) -> LogRow:
    return LogRow(
        collective=collective,
        nbytes=round(nbytes),
        dtype=context.dtype(dtype, f"{context.name}:{line}"),
        ranks=ranks,
        time_s=time_s,
        where=f"{context.name}:{line}",
    )


_TOOLS = (
    (re.compile(r"size\(B\)"), _nccom),
    (re.compile(r"Collective test starting|#\s+size\s+count\s+type", re.M), _nccl),
)
