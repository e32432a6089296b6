"""Ranks: runs programs and functions with many ranks in this process; and tests that are marked with `ranks`."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from ..config import check_main
from ..errors import UsageError, shown
from ..runtime.blame.reports import call_program
from ..version import install_command
from .faults import check_async_kinds
from .run import Answer, RanksFailed, Run, equal, whole_weights
from .running import Setting, explore, parse_setting, run_async, shows_fault

Repeating: TypeAlias = Callable[[str | os.PathLike[str], Sequence[str], Setting], str]


class Ranks:
    """Runs distributed programs in this process; the fixture `ranks` of pytest is one.

    Args:
        folder: Where programs with relative names are; by default the current one.
        repeating: Returns the line that repeats a run of a program, from its path, arguments and setting; by default
            that of a test.
        defaults: Settings of all its runs, such as `ranks=8`; see `program`.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, repeating: Repeating | None = None, **defaults: Any
    ) -> None:
        self._folder, self._defaults = Path(folder or "."), defaults
        self._repeating = repeating or _program_call
        parse_setting(defaults)

    def program(
        self,
        path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        package: str | None = None,
        check: bool = True,
        **setting: Any,
    ) -> Run:
        """Run an unchanged program that uses `torch.distributed` on every rank, and return the result of the run.

        Each rank is a thread, one of which runs at a time, and finds what torchrun would give its process: `RANK`,
        `WORLD_SIZE`, arguments, a `__main__` and random numbers of its own. Computes take virtual time by their bytes
        and flops, operations what the model says of the cluster.

        Args:
            path: File of the program; relative to the test's file, or to the current folder.
            args: Arguments of the program, a list such as `["--steps", "5"]`; a failing run that is made smaller may
                have fewer steps.
            package: Package of the file, for its relative imports.
            check: Whether to raise if anything is wrong; else ask `run.verdict`.
            setting: `ranks`, `cluster`, `seed`; `seeds` to try so many; `faults`, such as "die(rank=1, at=3)", or
                kinds that seeds draw from, such as "die, late"; `steps`, which the program is given as `--steps`;
                `timeout_s` (virtual) and `real_timeout_s`; `clock`, an `overlap.Virtual`; `allow`, kinds of verdicts
                that are no failures.

        Returns:
            The run; of several seeds the first one, or the one without faults if seeds draw some; its `results`,
            `same` and `equals` cover all of them. With `check=False` it is the first run that fails.

        Raises:
            RanksFailed: If the program is wrong: with ranks, operations and lines, and the line that repeats it.
            UsageError: For arguments that cannot be meant.
        """
        __tracebackhide__ = True
        own = self._folder / path
        file, words = own if own.exists() else Path(path), _argument_texts(args)
        setting = {"steps": _parse_steps(words), **setting}

        def run(chosen: Setting, line: str) -> Run:
            from .programs import load_file

            return load_file(file, _with_steps(words, chosen.steps), chosen, package).run(line)

        def line(chosen: Setting) -> str:
            return self._repeating(path, _with_steps(words, chosen.steps), replace(chosen, steps=None))

        return self._run_program(run, line, setting, check)

    def function(self, function: Callable[..., Any], *args: object, check: bool = True, **setting: Any) -> Run:
        """Call a function that uses `torch.distributed` on every rank; `run.results` has the returned values.

        Arguments and modules are the same objects on all ranks. Otherwise like `program`.
        """
        __tracebackhide__ = True

        def run(chosen: Setting, line: str) -> Run:
            from .programs import wrap_function

            return wrap_function(_with_steps_bound(function, chosen), args, chosen).run(line)

        def line(chosen: Setting) -> str:
            return f"ranks.function({_call_text(function, args)}, {chosen.arguments})"

        return self._run_program(run, line, setting, check)

    def run(self, main: Callable[..., Awaitable[Any]], *args: object, check: bool = True, **setting: Any) -> Run:
        """Run `main(rank, *args)` on every rank, as `overlap.run` does, in virtual time. Otherwise like `program`."""
        __tracebackhide__ = True
        chosen, seeds, kinds = _parse_async_setting({**self._defaults, **setting})
        check_main(_with_steps_bound(main, chosen), args)

        def run(setting: Setting, line: str) -> Run:
            program = _with_steps_bound(main, setting)
            return run_async(lambda rank: call_program(program, rank, args), setting, line)

        def line(setting: Setting) -> str:
            return f"ranks.run({_call_text(main, args)}, {setting.arguments})"

        return _run_seeds(run, line, chosen, seeds, kinds, check)

    def repeats(self, run: Callable[..., Run], *, seeds: int = 20) -> Answer:
        """Return whether a run has the same weights or results with each of many seeds.

        Args:
            run: Makes the run of one seed, such as `lambda seed: ranks.program("train.py", ranks=4, seed=seed)`.
            seeds: How many.

        Raises:
            UsageError: If `run` returns something else.
        """
        first = _run_of_seed(run, 0)
        for seed in range(1, seeds):
            other = _run_of_seed(run, seed)
            answer = first.equals(other) if whole_weights(first.weights) else _same_results(first, other)
            if not answer:
                return Answer(f"seed {seed}: {answer.problem}")
        return Answer()

    def _run_program(
        self,
        run: Callable[[Setting, str], Run],
        line: Callable[[Setting], str],
        setting: Mapping[str, Any],
        check: bool,
    ) -> Run:
        """Run a program of PyTorch with the seeds of a setting; arguments as for `_run_seeds`."""
        __tracebackhide__ = True
        chosen, seeds, kinds = parse_setting({**self._defaults, **setting})
        try:
            import torch  # noqa: F401
        except ImportError:
            raise UsageError(f"ranks: programs and functions need PyTorch: {install_command('torch')}") from None
        return _run_seeds(run, line, chosen, seeds, kinds, check)


def _parse_async_setting(values: Mapping[str, Any]) -> tuple[Setting, int, tuple[str, ...]]:
    """Return what `parse_setting` does, for an async function, to which some kinds of faults do nothing."""
    setting, seeds, kinds = parse_setting(dict(values))
    check_async_kinds([*kinds, *(fault.kind for fault in setting.faults)])
    return setting, seeds, kinds


def _program_call(path: str | os.PathLike[str], args: Sequence[str], setting: Setting) -> str:
    shown = f", args={args}" if args else ""
    return f'ranks.program("{path}"{shown}, {setting.arguments})'


def _call_text(function: Callable[..., Any], args: Sequence[object]) -> str:
    """Return a function and its arguments as a test writes them; long ones are cut short."""
    return ", ".join([getattr(function, "__name__", "function"), *map(reprlib.repr, args)])


def _argument_texts(args: Sequence[str]) -> list[str]:
    """Return a program's arguments as texts; refuse a single text, whose letters would be the arguments."""
    if isinstance(args, (str, bytes)):
        words = ", ".join(f'"{word}"' for word in os.fsdecode(args).split())
        raise UsageError(f"args: expected a list of words, got the text {args!r}; write args=[{words}]")
    return [str(argument) for argument in args]


def _parse_steps(args: Sequence[str]) -> int | None:
    for index, argument in enumerate(args):
        name, _, value = argument.partition("=")
        steps = value or next(iter(args[index + 1 :]), "")
        if name == _STEPS and steps.isdecimal() and int(steps):
            return int(steps)
    return None


def _with_steps(args: Sequence[str], steps: int | None) -> list[str]:
    """Return a program's arguments with another number of steps, which replaces the present number or is appended."""
    before = _parse_steps(args)
    if steps is None or steps == before:
        return list(args)
    if before is None:
        return [*args, _STEPS, str(steps)]
    arguments = [f"{_STEPS}={steps}" if argument.startswith(f"{_STEPS}=") else argument for argument in args]
    return [str(steps) if index and args[index - 1] == _STEPS else argument for index, argument in enumerate(arguments)]


_STEPS = "--steps"


def _with_steps_bound(function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """Return a function with its argument `steps` set, if the setting has a number of steps."""
    if setting.steps is None:
        return function
    parameters = signature(function).parameters
    if "steps" not in parameters and not any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        raise UsageError(
            f"steps: {getattr(function, '__name__', 'the function')} takes no argument `steps`; leave out steps="
        )
    return partial(function, steps=setting.steps)


def _run_seeds(
    run_line: Callable[[Setting, str], Run],
    line: Callable[[Setting], str],
    setting: Setting,
    seeds: int,
    kinds: tuple[str, ...],
    check: bool,
) -> Run:
    """Run a setting, with several seeds or faults if it asks for them, and return the run that the test gets.

    Args:
        run_line: Runs a setting; it takes the line that repeats this.
        line: Returns the line of a test that repeats a setting.
        setting: Setting of the first seed.
        seeds: The number of seeds.
        kinds: Kinds of faults that seeds draw from.
        check: Whether to raise if anything is wrong.
    """
    __tracebackhide__ = True

    def make(chosen: Setting) -> Run:
        return run_line(chosen, line(chosen))

    if seeds > 1 or kinds:
        runs = explore(make, setting, seeds=seeds, kinds=kinds, check=check)
        happened, ended = sum(len(run.faults) for run in runs), sum(run.error is not None for run in runs)
        summary = f"{happened} faults happened, and {ended} runs ended with the rank that was hit" if kinds else ""
        wrong = (number for number, run in enumerate(runs) if not check and shows_fault(run))
        chosen = runs.pop(next(wrong, 0 if seeds > 1 else -1))
        return replace(chosen, others=runs if seeds > 1 else [], tried=summary)
    run = make(setting)
    if check and shows_fault(run):
        run.check()
    return run


def _run_of_seed(run: Callable[..., Run], seed: int) -> Run:
    run_of_seed: object = run(seed=seed)
    if not isinstance(run_of_seed, Run):
        expected = "repeats: expected a function that returns the run of a seed, as ranks.run does"
        raise UsageError(f"{expected}, but it returned {shown(run_of_seed)}")
    return run_of_seed


def _same_results(first: Run, other: Run) -> Answer:
    for rank, (result, before) in enumerate(zip(other.returned, first.returned, strict=False)):
        if not equal(result, before):
            return Answer(f"rank {rank} returned {result!r}, in the first run {before!r}")
    return (
        Answer() if len(other.returned) == len(first.returned) else Answer("one of the runs has no results: it failed")
    )


# -- the marker ------------------------------------------------------------------------------------------------------


def run_marked(
    function: Callable[..., Awaitable[Any]],
    fixtures: Mapping[str, object],
    settings: Mapping[str, Any],
    *,
    takes_rank: bool,
) -> None:
    """Run a marked test function on every rank.

    Args:
        function: Test function.
        fixtures: Its arguments but `rank`; the same objects on all ranks.
        settings: Arguments of the marker.
        takes_rank: Whether the function has an argument `rank`.

    Raises:
        UsageError: If the marker cannot be meant.
        RanksFailed: If the program is wrong. An exception of a rank is raised as it is, such as an assertion that
            fails; but a `UsageError` of a rank is reported with its line.
    """
    if not takes_rank:
        raise UsageError(f"ranks: the test function {function.__name__} should take `rank`, its place among the ranks")
    setting, seeds, kinds = _parse_async_setting(settings)
    _with_steps_bound(function, setting)

    def run(chosen: Setting, line: str) -> Run:
        steps = {} if chosen.steps is None else {"steps": chosen.steps}
        return run_async(lambda rank: function(rank=rank, **{**fixtures, **steps}), chosen, line)

    def line(chosen: Setting) -> str:
        return f"@pytest.mark.ranks({chosen.arguments})"

    try:
        _run_seeds(run, line, setting, seeds, kinds, True)
    except RanksFailed as failure:
        own = failure.run.own_error
        if own is None or isinstance(own, UsageError):  # which is shown without a traceback: the verdict has the line
            raise
        own.add_note(str(failure))
        raise own from None
