"""Run: the result of a program with many ranks in one process, and the questions that a test can ask."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..errors import OverlapError, UsageError
from ..ranklist import named_ranks
from ..timeline.measure.metrics import breakdowns
from ..timeline.spans import Timeline
from . import latent
from .faults import Fault
from .folders import RunFolder
from .record import Record, Verdict

Weight = npt.NDArray[Any]

# Lines of a difference between traces, and of a rank's output, that a failure shows.
_SHOWN = 20


class RanksFailed(AssertionError):
    """A run failed; the message has the fault of the program, and the line that repeats the run.

    Args:
        run: The run.
        verdict: The fault.
        more: Further lines of the message.

    Attributes:
        run: The run.
        verdict: The fault.
    """

    def __init__(self, run: Run, verdict: Verdict, *, more: str = "") -> None:
        self.run: Run = run
        self.verdict: Verdict = verdict
        warned = [f"{named_ranks(ranks)} warned: {text.partition(chr(10))[0]}" for text, ranks in run.warnings.items()]
        parts = [*warned, str(verdict), more, _output_lines(run, verdict), f"repeat: {run.line}"]
        super().__init__("\n".join(filter(None, parts)))


class Answer:
    """Answer to a question of a test: true if there is no problem.

    Attributes:
        why: The problem, like `problem`; but reading it does not count as evaluating the answer.

    Args:
        problem: The problem as text; "": none.
    """

    __slots__ = ("why",)
    _unasked: ClassVar[list[Answer] | None] = None

    def __init__(self, problem: str = "") -> None:
        self.why: str = problem
        if problem and Answer._unasked is not None:
            Answer._unasked.append(self)

    def __bool__(self) -> bool:
        return not self.problem

    def __repr__(self) -> str:
        return f"<no: {self.problem}>" if self.problem else "<yes>"

    @property
    def problem(self) -> str:
        """The problem as text, or "" if there is none. Reading it counts as evaluating the answer, see `unasked`."""
        if Answer._unasked is not None:
            Answer._unasked[:] = [answer for answer in Answer._unasked if answer is not self]
        return self.why

    @classmethod
    @contextmanager
    def unasked(cls) -> Iterator[list[Answer]]:
        """Collect, during a `with` block, the answers with a problem that the test has not evaluated.

        Yields:
            The list of these answers, which changes as answers are made and evaluated.
        """
        before, cls._unasked = cls._unasked, []
        try:
            yield cls._unasked
        finally:
            cls._unasked = before


@dataclass(kw_only=True)
class Run:
    """The result of a run, or of the first of several seeds.

    Of several seeds, `results`, `same` and `equals` cover all runs. Measures (times, bytes, the trace, the timeline)
    and weights are those of this run.

    Attributes:
        size: Number of ranks.
        seed: Seed of the order of the ranks and of their speeds; 0: no seed.
        faults: The faults that have happened.
        returned: Results of the programs of this run, by rank; empty if the run failed.
        others: The runs of the other seeds.
        verdicts: The faults found in the program, the cause first; empty if there are none.
        record: Every operation of every rank.
        spans: Returns the timeline.
        output: Printed text of each rank.
        warnings: For each warning, the ranks that have shown it.
        weights: The weights of each rank at the end, by name.
        error: The exception that ended the run; None: no exception did.
        line: The line that repeats the run in a test.
        tried: Effects of the faults of several seeds, in words.
        as_one: Runs whose gradients were compared, in words, if gradients were compared with those of one rank.
        folder: Working directory of a program, which is removed with the run; None: the current folder.
    """

    size: int
    record: Record
    seed: int = 0
    faults: tuple[Fault, ...] = ()
    returned: list[Any] = field(default_factory=list)
    others: list[Run] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    spans: Callable[[], Timeline] | None = None
    output: list[str] = field(default_factory=list)
    warnings: dict[str, list[int]] = field(default_factory=dict)
    weights: list[dict[str, Weight]] = field(default_factory=list)
    error: BaseException | None = None
    line: str = ""
    tried: str = ""
    as_one: str = ""
    folder: RunFolder | None = None

    def __repr__(self) -> str:
        return f"<Run of {self.size} ranks, seed {self.seed}: {self.verdict or 'well'}>"

    @property
    def verdict(self) -> Verdict | None:
        """Cause of the failure, or None if all is well."""
        return self.verdicts[0] if self.verdicts else None

    def check(self) -> None:
        """Raise `RanksFailed` if anything is wrong."""
        __tracebackhide__ = True
        if self.verdicts:
            more = "\n".join(f"also {verdict}" for verdict in self.verdicts[1:])
            own = self.own_error
            # An error of overlap says everything, with the line of the program: no cause is shown.
            raise RanksFailed(self, self.verdicts[0], more=more) from None if isinstance(own, OverlapError) else own

    @property
    def own_error(self) -> BaseException | None:
        """The exception of a rank's program that ended the run; None if there was none, or another reason."""
        own = self.verdicts and self.verdicts[0].kind == "crash"
        return self.error.__cause__ if own and self.error is not None else None

    # -- what a test asks --------------------------------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        """This run, and the runs of other seeds that did not end with an error, each as a run of one seed."""
        return [replace(self, others=[]), *(other for other in self.others if other.error is None)]

    @property
    def results(self) -> list[Any]:
        """The results of the programs, by rank; empty if the run failed.

        Raises:
            UsageError: The results differ between seeds. `runs` has the run of each seed.
        """
        __tracebackhide__ = True
        for other in self.runs[1:]:
            if not are_equal(other.returned, self.returned):
                raise UsageError(
                    f"results: seed {other.seed} returned {reprlib.repr(other.returned)}, seed {self.seed} "
                    f"{reprlib.repr(self.returned)}; where seeds may differ, look at the results of each of run.runs\n"
                    f"repeat: {other.line}"
                )
        return self.returned

    def _first_problem(self, ask: Callable[[Run], Answer]) -> Answer:
        """Ask a question of the run of each seed; return the first problem, with its seed, or an answer without one."""
        for run in self.runs:
            if why := ask(run).problem:
                return Answer(f"seed {run.seed}: {why}\nrepeat: {run.line}" if self.others else why)
        return Answer()

    def same(self, what: str = "model weights") -> Answer:
        """Return whether all ranks have the same weights at the end, bit by bit, or the same results.

        Args:
            what: "model weights", at the end; "model weights after each update", for ranks that are never different in
                between; or "results", the values that the programs return.
        """
        comparisons = {
            "model weights": Run._compare_weights_of_ranks,
            "model weights after each update": Run._compare_updates_of_ranks,
            "results": Run._compare_results_of_ranks,
        }
        if what not in comparisons:
            raise UsageError(f"same: expected {', '.join(map(repr, comparisons))}; got {what!r}")
        return self._first_problem(comparisons[what])

    def _compare_updates_of_ranks(self) -> Answer:
        """Compare the weights of all ranks after each update, and at the end."""
        differing = latent.find_weight_difference(self.record)
        return self._compare_weights_of_ranks() if differing is None else Answer(str(differing))

    def _compare_weights_of_ranks(self) -> Answer:
        """Compare the weights of all ranks at the end; the problem names the update since which they differ."""
        if not any(self.weights):
            return Answer(
                "no rank has made a model of PyTorch; of async functions, same('results') compares what they return"
            )
        names = dict.fromkeys(name for rank in self.weights for name in rank)
        for name in names:
            answer = self._compare_weight_of_ranks(name)
            if answer.why:
                differing = latent.find_weight_difference(self.record, lasting=True)
                return answer if differing is None else Answer(str(differing))
        return Answer()

    def _compare_weight_of_ranks(self, name: str) -> Answer:
        """Compare one weight at the end of the run; a part of a sharded weight need not be on all ranks."""
        values = {rank: weights[name] for rank, weights in enumerate(self.weights) if name in weights}
        lacking = [rank for rank in range(self.size) if rank not in values]
        if lacking and " [part " not in name:
            return Answer(f"rank {lacking[0]} has no weight '{name}', rank {next(iter(values))} has")
        first, value = next(iter(values.items()))
        for rank, other in values.items():
            if other.shape != value.shape or other.tobytes() != value.tobytes():
                return Answer(
                    f"'{name}' differs between ranks {first} and {rank}: {_describe_difference(value, other)}"
                )
        return Answer()

    def _compare_results_of_ranks(self) -> Answer:
        for rank, result in enumerate(self.returned):
            if not are_equal(result, self.returned[0]):
                return Answer(f"rank {rank} returned {result!r}, rank 0 {self.returned[0]!r}")
        return Answer() if self.returned else Answer("the run has no results: it failed")

    def equals(self, other: Run, *, bound: float = 0.0) -> Answer:
        """Return whether two runs end with the same weights, such as runs with one rank and with many.

        Args:
            other: The other run.
            bound: Largest allowed difference of two elements; 0: they must be equal bit by bit.
        """
        return self._first_problem(lambda run: run._compare_run_weights(other, bound))

    def _compare_run_weights(self, other: Run, bound: float) -> Answer:
        """Compare the whole weights of two runs; `bound` is the largest absolute difference allowed."""
        own_weights, other_weights = whole_weights(self.weights), whole_weights(other.weights)
        if not own_weights or not other_weights:
            return Answer("one of the runs has made no model of PyTorch")
        if set(own_weights) != set(other_weights):
            return Answer(f"one of the runs has no weight '{sorted(set(own_weights) ^ set(other_weights))[0]}'")
        for name, value in own_weights.items():
            other_value = other_weights[name]
            if value.shape != other_value.shape:
                return Answer(f"'{name}' has shape {value.shape} here and {other_value.shape} there")
            if bound == 0.0 and value.tobytes() == other_value.tobytes():
                continue
            difference = float(np.abs(value.astype(np.float64) - other_value.astype(np.float64)).max(initial=0.0))
            if bound == 0.0 or not difference <= bound:
                return Answer(f"'{name}' differs by up to {difference:g}{f', more than {bound:g}' if bound else ''}")
        return Answer()

    def restores(self, path: str | os.PathLike[str]) -> Answer:
        """Return whether a checkpoint that the program has written is complete and can be read.

        Args:
            path: A file of `torch.save`, or a folder of `torch.distributed.checkpoint`; relative to the working
                directory of the run.
        """
        from .checkpoints import find_damage

        return Answer(find_damage(Path(path) if self.folder is None else self.folder.path / path))

    @cached_property
    def timeline(self) -> Timeline | None:
        """The timeline of the run in virtual time; None if no spans were recorded."""
        return None if self.spans is None else self.spans()

    @cached_property
    def exposed(self) -> float:
        """Part of the ranks' time, from 0 to 1, in which they communicated and did not compute."""
        if self.timeline is None:
            return 0.0
        parts = breakdowns(self.timeline)
        wall_ns = sum(part.wall_ns for part in parts)
        return sum(part.exposed_ns for part in parts) / wall_ns if wall_ns else 0.0

    @property
    def seconds(self) -> float:
        """Virtual time that the run took."""
        parts = breakdowns(self.timeline) if self.timeline is not None else []
        return max((part.wall_ns for part in parts), default=0) / 1e9

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank has passed to operations, receives excepted; of the rank with the most."""
        sent = [0] * self.size
        for issue in self.record.issues:
            sent[issue.rank] += issue.call.nbytes if issue.call.op != "recv" else 0
        return max(sent, default=0)

    @property
    def peak_bytes(self) -> int:
        """Largest memory of a rank's tensors at a time, in bytes; of the rank with the most."""
        return max(self.record.peak_bytes.values(), default=0)

    @property
    def trace(self) -> str:
        """Every operation in order, a line each; the same seed gives the same text on every machine."""
        return "".join(f"{line}\n" for line in self.record.lines())

    def matches(self, golden: str | os.PathLike[str]) -> Answer:
        """Return whether the trace is equal to the text of a file; if the file does not exist, write it.

        To write the file again, remove it, or set OVERLAP_GOLDEN=write.
        """
        path = Path(golden)
        if not path.exists() or os.environ.get("OVERLAP_GOLDEN") == "write":
            path.write_text(self.trace)
            return Answer()
        before, now = path.read_text().splitlines(), self.trace.splitlines()
        if before == now:
            return Answer()
        lines = list(difflib.unified_diff(before, now, path.name, "this run", lineterm="", n=1))
        more = [f"... and {len(lines) - _SHOWN} more lines"] if len(lines) > _SHOWN else []
        return Answer("the trace differs:\n" + "\n".join([*lines[:_SHOWN], *more]))


def are_equal(a: Any, b: Any) -> bool:
    """Whether two results have equal values. In arrays NaN equals NaN; a list equals a tuple of equal items."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind in "fc"))
    if hasattr(a, "equal") and hasattr(b, "equal"):  # tensors
        return bool(a.equal(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _describe_difference(a: Weight, b: Weight) -> str:
    """Return the difference of two arrays as text: their shapes, or the number of different elements and the first."""
    if a.shape != b.shape:
        return f"shapes {a.shape} and {b.shape}"
    positions = np.flatnonzero(a.reshape(-1) != b.reshape(-1))
    if not len(positions):
        return "in bits that compare as equal"
    first = positions[0]
    return f"{len(positions)} of {a.size} elements, the first {a.reshape(-1)[first]} and {b.reshape(-1)[first]}"


def whole_weights(ranks: Sequence[Mapping[str, Weight]]) -> dict[str, Weight]:
    """Return the whole weights of a run by name: from the first rank that has them, with shards joined on axis 0.

    Shards "w [part 0]" and "w [part 1]" give "w". A prefix "module." of the name is removed.
    """
    parts_by_name: dict[str, dict[str, Weight]] = {}
    for weights in ranks:
        for name, value in weights.items():
            base, _, part = name.partition(" [part ")
            parts_by_name.setdefault(base.removeprefix("module."), {}).setdefault(part, value)
    whole = {}
    for name, parts in parts_by_name.items():
        ordered = sorted(parts, key=lambda part: [int(index) for index in part.rstrip("]").split(", ") if index])
        whole[name] = np.concatenate([parts[part] for part in ordered]) if len(ordered) > 1 else parts[ordered[0]]
    return whole


def _output_lines(run: Run, verdict: Verdict) -> str:
    """Return the last lines that the first two ranks of a verdict have printed, without warnings."""
    shown = []
    warned = {line for text in run.warnings for line in text.splitlines()}
    for rank in verdict.ranks[:2]:
        printed = run.output[rank].splitlines() if rank < len(run.output) else []
        lines = [line for line in printed if line not in warned][-_SHOWN:]
        shown += [f"rank {rank} printed: {line}" for line in lines]
    return "\n".join(shown)
