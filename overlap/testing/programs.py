"""Programs that use `torch.distributed`, run unchanged with many ranks in this process: files and functions."""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext
from ctypes import py_object, pythonapi
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..runtime.rank import Rank
from ..torch.tensors import as_array
from . import pytorch, torch_store
from .as_one import AsOne
from .batches import Batches
from .folders import RunFolder
from .guards import ProcessGuard, ProgramExit
from .hashing import NAME, compile_program
from .judging import blocked_issues, judge_run, judge_wrong_group
from .record import Record, Verdict
from .run import Run
from .running import Setting, make_run, run_world
from .substitutes import Substitute
from .threads import RankThread, RealTime
from .torch_rank import TorchRank
from .views import RankProcess, restoring_process
from .watch import ModelWatch, Watch
from .world import TestedBackend

if TYPE_CHECKING:
    from ..runtime.world import World


# If a rank misses a file, other ranks run for this virtual time: one of them may write it.
_LATE_S = 1.0

# The verdict on a program that does not communicate: a test of it tests nothing.
_SILENT = Verdict(
    kind="no communication",
    text="the program has ended, and no rank has issued any operation: does it call init_process_group, and does it "
    'run under `if __name__ == "__main__"`?',
)


class TestedProgram:
    """A program of PyTorch, to be run with many ranks.

    Args:
        body: Runs the program of a rank, in the rank's thread; it gets the process as the rank sees it.
        argv: Arguments of the program.
        setting: Options of the run.
        folder: Each rank loads modules from this folder for itself; None: all modules are shared.
        batches: Makes the recorder of a rank's updates, from the rank and a function that returns its parameters. None:
            `Batches` if the setting has `as_one`, otherwise no recorder.
        released: By rank, the index of the operation from which on its operations wait for no other rank. None: all
            operations wait.
    """

    def __init__(
        self,
        body: Callable[[RankProcess], Any],
        argv: Sequence[str],
        setting: Setting,
        folder: str | None = None,
        *,
        batches: Callable[[int, Callable[[], dict[str, Any]]], Batches] | None = None,
        released: dict[int, int] | None = None,
    ) -> None:
        self._body, self._argv, self._setting, self._folder = body, list(argv), setting, folder
        self._new_batches = batches or (Batches if setting.as_one else None)
        self._released = released or {}
        self._threads: dict[int, RankThread[Any]] = {}
        self._ranks: list[TorchRank] = []
        self._store: dict[str, bytes] = {}
        self._views: list[RankProcess] = []
        self._guard = ProcessGuard()

    def run(self, line: str) -> Run:
        """Run the program once, and return the result with its verdicts; `line` repeats the run in a test."""
        self._cwd = RunFolder()
        with ExitStack() as stack:
            stack.enter_context(restoring_process())
            stack.enter_context(pytorch.separating_torch_of_ranks())
            stack.enter_context(self._guard.guarding_process())
            if self._new_batches is not None:
                stack.enter_context(pytorch.recording_batches())
            if self._folder is not None:
                sys.path.insert(0, self._folder)
            # Threads that ranks have started run between turns, too, and must find the working directory.
            with contextlib.chdir(self._cwd.path):
                outcome = run_world(self._setting, self._make_main)
            if any(thread.is_stuck for thread in self._threads.values()):
                # Never free this object: a stuck thread may hold locks that C++ would wait for.
                pythonapi.Py_IncRef(py_object(self))
            run = make_run(outcome, self._setting, line)
            run.output = [view.output.getvalue() for view in self._views]
            for rank, view in enumerate(self._views):
                for text in view.output.warnings:
                    run.warnings.setdefault(text, []).append(rank)
            run.folder = self._cwd
            is_silent = not (outcome.record.issues or torch_store.is_used())
            models = [rank.models for rank in sorted(self._ranks, key=lambda rank: rank.models.rank)]
            run.weights = [_weight_arrays(watch) for watch in models]
            synchronised = any(watch.expects_same_weights for watch in models)
            recorded = [batches for each in models if (batches := each.batches) is not None]
        verdicts = judge_run(
            outcome.record, outcome.error, synchronised=synchronised, shared_order=True, unused=outcome.unused
        )
        if outcome.error is not None and verdicts[0].kind == "cycle" and not self._released:
            verdicts[0] = self._judge_wrong_group(outcome.record) or verdicts[0]
        if is_silent and not verdicts and run.size > 1:
            verdicts.append(_SILENT)
        if self._setting.as_one:
            differences, run.as_one = AsOne(run, recorded, self._run_with_joined_data).compare()
            verdicts += differences
        run.verdicts = [_add_gpu_advice(verdict) for verdict in verdicts if verdict.kind not in self._setting.allow]
        return run

    def _run_with_joined_data(
        self, size: int, source: Substitute, updates: int, every: bool
    ) -> tuple[Run, list[Batches]]:
        """Run `updates` updates on `size` ranks with data of a source; `every` records the gradients of all."""
        setting = Setting(ranks=size, timeout_s=self._setting.timeout_s, real_timeout_s=self._setting.real_timeout_s)
        recorded: dict[int, Batches] = {}

        def make_recorder(rank: int, names: Callable[[], dict[str, Any]]) -> Batches:
            """Return the recorder of a rank, and keep it in `recorded`."""
            recorded[rank] = Batches(rank, names, source, updates, every=every)
            return recorded[rank]

        run = TestedProgram(self._body, self._argv, setting, self._folder, batches=make_recorder).run("")
        return run, [recorded[rank] for rank in sorted(recorded)]

    def _judge_wrong_group(self, record: Record) -> Verdict | None:
        """Run the program again with the blocked operations ending at once, to find a wrong group; None without one."""
        released = {rank: issue.index for rank, issue in blocked_issues(record).items()}
        again = TestedProgram(self._body, self._argv, self._setting, self._folder, released=released)
        return judge_wrong_group(record, again.run("").record)

    def _make_main(self, clock: TestedBackend, world: World) -> Callable[..., Awaitable[Any]]:
        """Connect this program to a world that is about to run, and return the function that runs each rank."""
        record, plan = clock.record, clock.plan
        clock.injector.released = self._released
        plan.on_signal = lambda rank: self._threads[rank].call_after_wait(lambda: self._guard.handle_sigterm(rank))
        self._guard.plan = plan
        self._views = [
            RankProcess(
                rank, world.size, argv=self._argv, seed=self._setting.seed, folder=self._folder,
                cwd=str(self._cwd.path), more=[pytorch.save_torch_state],
            )
            for rank in range(world.size)
        ]  # fmt: skip
        end_stalled = world.end_deadlocked

        def record_and_end() -> None:
            """Record the line at which each unfinished rank is, and end the world."""
            for number, thread in self._threads.items():
                if number not in record.left:
                    record.places[number] = thread.line_now()
            end_stalled()

        clock.kernel.on_stall = record_and_end
        real_time = RealTime(self._setting.real_timeout_s)

        async def main(rank: Rank) -> Any:
            """Run the program of a rank in a thread, which takes turns with those of the other ranks."""
            thread: RankThread[Any] = RankThread(
                rank, clock.kernel, self._views[rank.rank], lambda thread: self._run_rank(thread, clock),
                real_time=real_time, compute_ns=partial(plan.slowed_compute_ns, rank.rank),
            )  # fmt: skip
            self._threads[rank.rank] = thread
            if plan.turns is not None:
                thread.turn = partial(plan.turns.wait_for_turn, rank.rank)
            return await thread.run_program()

        return main

    def _run_rank(self, thread: RankThread[Any], clock: TestedBackend) -> Any:
        """Run the program of one rank in its thread, and record how it ended and what it left behind."""
        record, number = clock.record, thread.rank.rank
        models = ModelWatch(number, record)
        watch = Watch(thread, record)
        # Both watch this rank: `watch` its tensors, until the first forward, `models` its models and updates.
        watch.roles = models.roles
        models.batches = None if self._new_batches is None else self._new_batches(number, models.unlabelled_parameters)
        torch_rank = TorchRank(thread, self._store, record, clock.injector, watch, models)
        self._ranks.append(torch_rank)
        # Threads that the program starts and leaves running are reported as leaks.
        threads_before = set(threading.enumerate())
        try:
            with watch, models.batches or nullcontext():
                result = self._body(self._views[number])
            torch_rank.wait_for_futures()
        except SystemExit as exit:
            if exit.code not in (None, 0):
                call = f"sys.exit({exit.code!r})"
                raise ProgramExit(f"rank {number} called {call}: it has failed; see what it printed before") from exit
            record.left[number] = "called sys.exit()"
            return None
        except FileNotFoundError as error:
            path = os.path.abspath(str(error.filename))
            # Another rank may be about to write the file: then the verdict names this rank.
            thread.sleep(_LATE_S)
            record.late_files[number] = self._guard.written.get(path, "")
            raise
        record.left.setdefault(number, "")
        clock.injector.record_unfinished_operations(number, sends=True)
        self._record_leaks(number, record, threads_before)
        return result

    def _record_leaks(self, number: int, record: Record, before: set[threading.Thread]) -> None:
        """Record files that a rank has left open for writing, and threads left running that are not in `before`."""
        for name in self._guard.files_left_open(number):
            record.leaks.append((number, f"has left the file {name} open, which it writes", ""))
        ranks = {thread._thread for thread in self._threads.values()}
        for thread in set(threading.enumerate()) - before - ranks:
            if not thread.daemon:
                record.leaks.append((number, f"has left a thread running: {thread.name}", ""))


def load_program(
    path: str | os.PathLike[str], args: Sequence[str], setting: Setting, package: str | None = None
) -> TestedProgram:
    """Return the program in a file.

    Args:
        path: The file.
        args: Arguments of the program.
        setting: Options of the run.
        package: Package for its relative imports; None: it has none.

    Raises:
        UsageError: The file cannot be read, or is no Python program.
    """
    file = Path(path).absolute()
    try:
        code = compile_program(file.read_bytes(), str(file))
    except OSError as error:
        raise UsageError(f"program: cannot read {path}: {error.strerror}; pass the path of a program") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"program: {path} is no Python program: {error}; correct it") from None
    argv, folder = [str(path), *map(str, args)], f"{file.parent}{os.sep}"
    return TestedProgram(lambda view: _execute_program(code, str(file), view, package), argv, setting, folder)


def _execute_program(code: CodeType, file: str, view: RankProcess, package: str | None) -> None:
    """Run code of `compile_program` as the `__main__` of a rank; `package` is that of its relative imports."""
    view.main.__file__, view.main.__package__ = file, package
    view.main.__dict__.update({NAME: view.set_type, "set": view.set_type})
    # Each rank gets a copy of the code. The compiler of torch caches compiled frames by code object, and a cached frame
    # uses the globals of the rank for which it was compiled.
    exec(marshal.loads(marshal.dumps(code)), view.main.__dict__)


def wrap_function(function: Callable[..., Any], args: Sequence[object], setting: Setting) -> TestedProgram:
    """Return a program that calls a function.

    Args:
        function: The function.
        args: Its arguments, the same objects on all ranks.
        setting: Options of the run.

    Raises:
        UsageError: It is no function.
    """
    if not callable(function):
        raise UsageError(f"function: expected a function, got {function!r}")
    return TestedProgram(lambda view: function(*args), sys.argv, setting)


def _weight_arrays(models: ModelWatch) -> dict[str, Any]:
    """Return the weights of a rank as arrays by name, without weights of types that numpy lacks."""
    arrays = {}
    for name, tensor in models.weights().items():
        try:
            arrays[name] = np.array(as_array(tensor.contiguous()))
        except ValueError:  # of a type that has no array
            continue
    return arrays


def _add_gpu_advice(verdict: Verdict) -> Verdict:
    """Return a verdict; a crash because there is no GPU gets advice."""
    if verdict.kind == "crash" and ("CUDA" in verdict.text or "NVIDIA" in verdict.text):
        text = f"{verdict.text}; in a test all ranks compute on the CPU: choose the device by torch.cuda.is_available()"
        return Verdict(kind=verdict.kind, text=text, ranks=verdict.ranks, lines=verdict.lines)
    return verdict
