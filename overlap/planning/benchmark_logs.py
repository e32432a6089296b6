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
from ..cost.parameters import itemsize_bytes
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
_NOT_WHOLE_BYTES = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?[kKMGT]?i?[bB]?")
# Largest relative difference of a printed bandwidth from size over time: both are printed with four digits.
_BANDWIDTH_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One measured collective."""

    collective: str  # its name
    nbytes: int  # bytes of the whole vector
    dtype: str  # dtype of the elements, as numpy names it
    ranks: int | None  # number of ranks; None if the log lacks it
    time_s: float  # time of one operation
    where: str  # file and line
    # (host, device) of each rank, hosts from 0; empty if the log lacks them.
    places: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLog:
    """A benchmark's output."""

    tool: str  # name of the benchmark
    rows: tuple[LogRow, ...]  # in the order of the file
    dropped: tuple[str, ...] = ()  # remarks on rows that were left out


def read(path: str, *, op: str | None = None, ranks: int | None = None) -> BenchmarkLog:
    """Read a log of a collective benchmark, of whichever tool.

    Args:
        path: Path of the file.
        op: The collective, where the log lacks it.
        ranks: Number of ranks, where the log lacks it.

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
        return _parse_own_json(text, name)
    lines = list(enumerate(text.splitlines(), 1))
    for sign, parse in _TOOLS:
        if sign.search(text):
            log = parse(_LogContext(name=name, op=op, ranks=ranks), lines)
            return log if log.dropped else replace(log, dropped=_missing_rows(log.rows))
    raise UsageError(f"{name}: expected the output of nccl-tests, nccom-test or `overlap bench --json`")


def _missing_rows(rows: Sequence[LogRow]) -> tuple[str, ...]:
    """Return a remark for each gap in the sizes of a log, whose sizes mostly grow by one factor."""
    pairs = [(a, b) for a, b in pairwise(rows) if (a.collective, a.dtype) == (b.collective, b.dtype)]
    steps = Counter(b.nbytes / a.nbytes for a, b in pairs)
    factor, count = steps.most_common(1)[0] if steps else (1.0, 0)
    if factor <= 1 or 2 * count < len(pairs):
        return ()
    return tuple(
        f"{b.where}: expected {format_bytes(round(a.nbytes * factor))} after {format_bytes(a.nbytes)}, found "
        f"{format_bytes(b.nbytes)}: rows are missing"
        for a, b in pairs
        if b.nbytes > a.nbytes * factor
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogContext:
    """Name of a log, and what the command line says about its rows."""

    name: str
    op: str | None
    ranks: int | None

    def row_error(self, line: int, expected: str, found: str) -> UsageError:
        """Return the error of a line: what was expected there, and what was found."""
        return UsageError(f"{self.name}:{line}: expected {expected}, found {found.strip()!r}")

    def collective_name(self, text: str | None) -> str:
        """Return our name of a collective from the text of a log, or from `op` if the log has none."""
        name = (text or self.op or "").lower().removesuffix("_perf")
        if name not in _OPERATIONS:
            raise UsageError(f"{self.name}: says no collective that is known; give --collective, one of {_COLLECTIVES}")
        return _OPERATIONS[name]

    def parse_number(self, text: str, line: int, meaning: str, *, least: float = 0.0) -> float:
        """Return the number in a text; refuse other texts, infinity, and numbers not above `least`."""
        try:
            value = float(text)
        except ValueError:
            raise self.row_error(line, meaning, text) from None
        if not value > least or value == float("inf"):
            raise self.row_error(line, f"{meaning}, more than {least:g}", text)
        return value

    def is_row(self, words: Sequence[str], number: int, line: str) -> bool:
        """Return whether a line is a row, and not something else that a job printed."""
        if not words or words[0].isdigit():
            return bool(words)
        if _NOT_WHOLE_BYTES.fullmatch(words[0]) and len(words) > 1:
            raise self.row_error(number, "a size in whole bytes", line)
        return False

    def parse_dtype(self, name: object, where: str) -> str:
        """Return the numpy name of a dtype of a log; refuse an unknown one."""
        text = str(name).lower()
        dtype = _DTYPES.get(text, text)
        try:
            itemsize_bytes(dtype)
        except UsageError:
            raise UsageError(f"{where}: expected a dtype such as float or bfloat16, found {str(name)!r}") from None
        return dtype

    def check_bandwidth(self, line: int, nbytes: float, time_s: float, printed: str, units: Sequence[float]) -> None:
        """Refuse a printed bandwidth that does not follow from size and time in any of the units it may have."""
        rate = self.parse_number(printed, line, "a bandwidth")
        expected = [nbytes / time_s / unit for unit in units]
        rounding = 0.006 / rate  # of two digits
        if all(abs(rate / each - 1) > _BANDWIDTH_TOLERANCE + rounding for each in expected):
            raise self.row_error(
                line, f"a bandwidth of {expected[0]:.4g} GB/s ({nbytes:g} bytes in {time_s:g} s)", printed
            )

    def check_count(self, line: int, row: LogRow, count: str, dtype: str) -> None:
        """Refuse a number of elements that does not make up the bytes, of all ranks or of one."""
        nbytes = self.parse_number(count, line, "elements") * itemsize_bytes(row.dtype)
        if row.nbytes not in (nbytes, nbytes * (row.ranks or 1)) and row.nbytes % nbytes:
            raise self.row_error(
                line, f"{row.nbytes // itemsize_bytes(row.dtype)} elements of {dtype} in {row.nbytes} B", count
            )


_Lines = Sequence[tuple[int, str]]


def _parse_nccl_tests(context: _LogContext, lines: _Lines) -> BenchmarkLog:
    """Return the rows of an output of nccl-tests, without rows that had wrong results."""
    title = re.search(r"starting: (\w+)", "\n".join(line for _, line in lines))
    collective = context.collective_name(title[1] if title else None)
    listed_ranks, places = _rank_places([line for _, line in lines])
    ranks = listed_ranks or context.ranks
    if context.ranks not in (None, ranks):
        raise UsageError(f"--ranks: {context.name} says that {ranks} took part, got {context.ranks}; leave it out")
    rows, dropped = [], []
    for number, line in lines:
        words = line.split()
        if re.match(r"#\s+\(", line) and not set(re.findall(r"\(\S*?\)", line)) <= _NCCL_UNITS:
            raise context.row_error(number, " ".join(sorted(_NCCL_UNITS)), line)
        if line.startswith("#") or not context.is_row(words, number, line):
            continue
        if len(words) < 9:
            raise context.row_error(number, "size count type redop root time algbw busbw #wrong", line)
        size, time_us = (
            context.parse_number(words[0], number, "bytes", least=-1),
            context.parse_number(words[5], number, "microseconds"),
        )
        if not size:
            continue
        context.check_bandwidth(number, size, time_us / 1e6, words[6], (1e9,))
        if words[8] not in ("0", "N/A"):
            dropped.append(f"{context.name}:{number}: {words[8]} wrong results")
            continue
        row = _make_row(context, number, collective, size, words[2], ranks, time_us / 1e6)
        context.check_count(number, row, words[1], words[2])
        rows.append(replace(row, places=places))
    if not any(line.startswith("# Avg bus bandwidth") for _, line in lines):
        dropped.append(f"{context.name}: ends before its average bus bandwidth, so rows may be missing")
    return BenchmarkLog(tool="nccl-tests", rows=tuple(rows), dropped=tuple(dropped))


_NCCL_UNITS = frozenset({"(B)", "(elements)", "(us)", "(GB/s)"})


_RANK = re.compile(r"#\s+Rank\s+\d+(?:.*?\bon\s+(\S+)\s+device\s+(\d+))?")


def _rank_places(lines: Sequence[str]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the number of listed ranks and their (host, device), hosts numbered; no places unless all have one."""
    matches = [match for line in lines if (match := _RANK.match(line))]
    if not all(match[1] for match in matches):
        return len(matches), ()
    hosts: dict[str, int] = {}
    return len(matches), tuple((hosts.setdefault(match[1], len(hosts)), int(match[2])) for match in matches)


def _parse_nccom_test(context: _LogContext, lines: _Lines) -> BenchmarkLog:
    """Return the rows of an output of nccom-test, without failed ones."""
    collective, columns, rows, dropped = context.collective_name(None), list[str](), [], []
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
            raise context.row_error(number, " ".join(columns), line)
        value = dict(zip(columns, words, strict=False))
        time = next((name for name in columns if name.startswith("time")), "")
        if not time.endswith("(us)"):
            raise context.row_error(number, "a column of times in (us)", time or line)
        size, time_us = (
            context.parse_number(words[0], number, "bytes"),
            context.parse_number(value[time], number, "microseconds"),
        )
        if "algbw(GB/s)" in value:
            context.check_bandwidth(number, size, time_us / 1e6, value["algbw(GB/s)"], (1e9, 2.0**30))
        rows.append(
            _make_row(context, number, collective, size, value.get("type", "fp32"), context.ranks, time_us / 1e6)
        )
    return BenchmarkLog(tool="nccom-test", rows=tuple(rows), dropped=tuple(dropped))


def _parse_own_json(text: str, name: str) -> BenchmarkLog:
    """Return the rows of collectives in JSON of `overlap bench`, without rows that had wrong results."""
    context = _LogContext(name=name, op=None, ranks=None)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}:{error.lineno}: expected JSON of `overlap bench --json`, found no JSON") from None
    rows_found = document.get("rows") if isinstance(document, Mapping) else None
    if not isinstance(rows_found, list):
        raise UsageError(f"{name}: expected JSON of `overlap bench --json`, with rows")
    rows, dropped = [], []
    for number, row in enumerate(rows_found):
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
            context.parse_dtype(dtype, f"{name}: row {number}")
            nbytes, nanos = (_positive_number(figure, key, f"{name}: row {number}") for figure, key in (
                (size, "size_bytes"), (time_ns, "median_ns")))  # fmt: skip
            rows.append(
                _make_row(context, number, context.collective_name(operation), nbytes, dtype, ranks, nanos / 1e9)
            )
    return BenchmarkLog(tool="overlap bench", rows=tuple(rows), dropped=tuple(dropped))


def _positive_number(value: object, name: str, where: str) -> float:
    """Return a positive, finite number of a JSON file as a float; refuse any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UsageError(f"{where}: expected {name} to be a number, more than 0, found {value!r}")
    return float(value)


def _make_row(
    context: _LogContext, line: int, collective: str, nbytes: float, dtype: str, ranks: int | None, time_s: float
) -> LogRow:
    """Return a row with the dtype in its numpy name, and the file and line it is from."""
    return LogRow(
        collective=collective,
        nbytes=round(nbytes),
        dtype=context.parse_dtype(dtype, f"{context.name}:{line}"),
        ranks=ranks,
        time_s=time_s,
        where=f"{context.name}:{line}",
    )


_TOOLS = (
    (re.compile(r"size\(B\)"), _parse_nccom_test),
    (re.compile(r"Collective test starting|#\s+size\s+count\s+type", re.M), _parse_nccl_tests),
)
