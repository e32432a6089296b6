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
from ..errors import UsageError, argument_text
from ..runtime.blame.reports import call_program
from ..version import install_command
from .faults import check_kinds_for_async
from .run import Answer, RanksFailed, Run, are_equal, whole_weights
from .running import Setting, Trials, parse_trials, run_async, shows_program_fault, try_seeds

Repeating: TypeAlias = Callable[[str | os.PathLike[str], Sequence[str], Setting], str]
"""Returns the line that repeats the run of a program, from its path, its arguments and the setting."""


class Ranks:
    """Runs distributed programs in this process; the fixture `ranks` of pytest is one.

    Args:
        folder: Folder of programs with relative paths; None: the current one.
        repeating: Makes the line that repeats the run of a program; None: as a test would write it.
        defaults: Settings of all runs, such as `ranks=8`; see `program`.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, repeating: Repeating | None = None, **defaults: Any
    ) -> None:
        self._folder, self._defaults = Path(folder or "."), defaults
        self._repeating = repeating or _program_call_text
        parse_trials(defaults)

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

        Each rank is a thread, and one of them runs at a time. A rank has everything that torchrun gives a process:
        `RANK`, `WORLD_SIZE`, arguments, a `__main__` and random numbers of its own. Computes take virtual time by their
        bytes and flops. Operations take the time that the model of the cluster predicts.

        Args:
            path: File of the program; relative to the test's file, or to the current folder.
            args: Arguments of the program, a list such as `["--steps", "5"]`. The number of steps is reduced when a
                failing run is made smaller.
            package: Package of the file, for its relative imports; None: the file is in no package.
            check: Whether to raise an error if anything is wrong; otherwise look at `run.verdict`.
            setting: `ranks`, `cluster`, `seed`; `seeds`, the number of seeds to try; `faults`, such as
                "die(rank=1, at=3)", or kinds that seeds draw from, such as "die, late"; `steps`, which the program gets
                as `--steps`; `timeout_s` (virtual) and `real_timeout_s`; `clock`, an `overlap.Virtual`; `allow`, kinds
                of verdicts that are no failures.

        Returns:
            The run. Of several seeds, it is the run of the first one, or the run without faults if seeds draw faults;
            `results`, `same` and `equals` cover all seeds. With `check=False` it is the first run that fails.

        Raises:
            RanksFailed: If the program is wrong. The message has ranks, operations and lines, and the line that repeats
                the run.
            UsageError: If an argument is invalid.
        """
        __tracebackhide__ = True
        own = self._folder / path
        file, words = own if own.exists() else Path(path), _argument_texts(args)
        setting = {"steps": _parse_steps(words), **setting}

        def run_trial(trial: Setting) -> Run:
            from .programs import load_program

            arguments = _replace_steps(words, trial.steps)
            # The arguments already have the number of steps, so the setting in the line leaves it out.
            repeat_line = self._repeating(path, arguments, replace(trial, steps=None))
            return load_program(file, arguments, trial, package).run(repeat_line)

        return self._run_program(run_trial, setting, check)

    def function(self, function: Callable[..., Any], *args: object, check: bool = True, **setting: Any) -> Run:
        """Call a function that uses `torch.distributed` on every rank; `run.results` has the returned values.

        Arguments and modules are the same objects on all ranks. Otherwise like `program`.
        """
        __tracebackhide__ = True

        def run_trial(trial: Setting) -> Run:
            from .programs import wrap_function

            line = f"ranks.function({_call_text(function, args)}, {trial.arguments})"
            return wrap_function(_bind_steps(function, trial), args, trial).run(line)

        return self._run_program(run_trial, setting, check)

    def run(self, main: Callable[..., Awaitable[Any]], *args: object, check: bool = True, **setting: Any) -> Run:
        """Run `main(rank, *args)` on every rank, as `overlap.run` does, in virtual time. Otherwise like `program`."""
        __tracebackhide__ = True
        trials = _parse_async_trials({**self._defaults, **setting})
        check_main(_bind_steps(main, trials.setting), args)

        def run_trial(trial: Setting) -> Run:
            line = f"ranks.run({_call_text(main, args)}, {trial.arguments})"
            program = _bind_steps(main, trial)
            return run_async(lambda rank: call_program(program, rank, args), trial, line)

        return _run_trials(run_trial, trials, check)

    def repeats(self, run: Callable[..., Run], *, seeds: int = 20) -> Answer:
        """Return whether a run has the same weights or results with each of many seeds.

        Args:
            run: Makes the run of one seed, such as `lambda seed: ranks.program("train.py", ranks=4, seed=seed)`.
            seeds: Number of seeds, from 0 on.

        Raises:
            UsageError: `run` does not return a `Run`.
        """
        first = _make_seed_run(run, 0)
        for seed in range(1, seeds):
            other = _make_seed_run(run, seed)
            answer = first.equals(other) if whole_weights(first.weights) else _compare_results(first, other)
            if not answer:
                return Answer(f"seed {seed}: {answer.problem}")
        return Answer()

    def _run_program(self, run: Callable[[Setting], Run], setting: Mapping[str, Any], check: bool) -> Run:
        """Run a program of PyTorch; `setting` overrides the defaults. Raises UsageError if PyTorch is not installed."""
        __tracebackhide__ = True
        trials = parse_trials({**self._defaults, **setting})
        try:
            import torch  # noqa: F401
        except ImportError:
            text = f"ranks.program and .function need PyTorch, which is not installed: {install_command('torch')}"
            raise UsageError(f"{text}; async functions run without it") from None
        return _run_trials(run, trials, check)


def _parse_async_trials(values: Mapping[str, Any]) -> Trials:
    """Return the trials of an async function; refuse kinds of faults that do nothing to it with a UsageError."""
    trials = parse_trials(values)
    check_kinds_for_async([*trials.kinds, *(fault.kind for fault in trials.setting.faults)])
    return trials


def _program_call_text(path: str | os.PathLike[str], args: Sequence[str], setting: Setting) -> str:
    """Return the line of a test that repeats the run of a program."""
    shown = f", args={args}" if args else ""
    return f'ranks.program("{path}"{shown}, {setting.arguments})'


def _call_text(function: Callable[..., Any], args: Sequence[object]) -> str:
    """Return a function and its arguments as text, such as "main, 3, 'x'"; long arguments are cut short."""
    return ", ".join([getattr(function, "__name__", "function"), *map(reprlib.repr, args)])


def _argument_texts(args: Sequence[str]) -> list[str]:
    """Return a program's arguments as a list of texts; refuse a single text, whose letters would be the arguments."""
    if isinstance(args, (str, bytes)):
        words = ", ".join(f'"{word}"' for word in os.fsdecode(args).split())
        raise UsageError(f"args: expected a list of words, got the text {args!r}; write args=[{words}]")
    return [str(argument) for argument in args]


def _parse_steps(args: Sequence[str]) -> int | None:
    """Return the number after `--steps` among the arguments of a program, or None without one."""
    for index, argument in enumerate(args):
        name, _, value = argument.partition("=")
        steps = value or next(iter(args[index + 1 :]), "")
        if name == _STEPS and steps.isdecimal() and int(steps):
            return int(steps)
    return None


def _replace_steps(args: Sequence[str], steps: int | None) -> list[str]:
    """Return a program's arguments with another number after `--steps`, which is appended if it is missing."""
    before = _parse_steps(args)
    if steps is None or steps == before:
        return list(args)
    if before is None:
        return [*args, _STEPS, str(steps)]
    arguments = [f"{_STEPS}={steps}" if argument.startswith(f"{_STEPS}=") else argument for argument in args]
    return [str(steps) if index and args[index - 1] == _STEPS else argument for index, argument in enumerate(arguments)]


_STEPS = "--steps"


def _bind_steps(function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """Bind `steps` of a function, if the setting has them; raise UsageError if it has no such argument."""
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


def _run_trials(run: Callable[[Setting], Run], trials: Trials, check: bool) -> Run:
    """Run the trials of a test, and return the run that the test gets.

    With `check=False`, that is the first run with a fault. Otherwise it is the run of the first seed; if one seed draws
    faults, the run with these.
    """
    __tracebackhide__ = True
    if trials.seeds == 1 and not trials.kinds:
        only = run(trials.setting)
        if check and shows_program_fault(only):
            only.check()
        return only
    runs, several = try_seeds(run, trials, check=check), trials.seeds > 1
    happened, ended = sum(len(each.faults) for each in runs), sum(each.error is not None for each in runs)
    summary = f"{happened} faults happened, and {ended} runs ended with the rank that was hit" if trials.kinds else ""
    wrong = (number for number, each in enumerate(runs) if not check and shows_program_fault(each))
    # Index 0 is the first seed. If a single seed draws faults, the run without faults comes first: take the last one.
    chosen = runs.pop(next(wrong, 0 if several else -1))
    return replace(chosen, others=runs if several else [], tried=summary)


def _make_seed_run(run: Callable[..., Run], seed: int) -> Run:
    """Return the run of a seed; refuse a function that returns no `Run`, with a UsageError."""
    run_of_seed: object = run(seed=seed)
    if not isinstance(run_of_seed, Run):
        expected = "repeats: expected a function that returns the run of a seed, as ranks.run does"
        raise UsageError(f"{expected}, but it returned {argument_text(run_of_seed)}")
    return run_of_seed


def _compare_results(first: Run, other: Run) -> Answer:
    for rank, (result, before) in enumerate(zip(other.returned, first.returned, strict=False)):
        if not are_equal(result, before):
            return Answer(f"rank {rank} returned {result!r}, in the first run {before!r}")
    if len(other.returned) != len(first.returned):
        return Answer("one of the runs has no results: it failed")
    return Answer()


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
        fixtures: Arguments of the function other than `rank`; the same objects on all ranks.
        settings: Arguments of the marker.
        takes_rank: Whether the function has an argument `rank`.

    Raises:
        UsageError: An argument of the marker is invalid, or the function has no argument `rank`.
        RanksFailed: The program is wrong. But an exception of a rank, such as a failed assertion, is raised as it is,
            unless it is a `UsageError`.
    """
    if not takes_rank:
        raise UsageError(f"ranks: the test function {function.__name__} should take `rank`, its place among the ranks")
    trials = _parse_async_trials(settings)
    _bind_steps(function, trials.setting)

    def run(chosen: Setting) -> Run:
        steps = {} if chosen.steps is None else {"steps": chosen.steps}
        line = f"@pytest.mark.ranks({chosen.arguments})"
        return run_async(lambda rank: function(rank=rank, **{**fixtures, **steps}), chosen, line)

    try:
        _run_trials(run, trials, True)
    except RanksFailed as failure:
        own = failure.run.own_error
        # A UsageError is shown without a traceback: raise the verdict instead, which has the line.
        if own is None or isinstance(own, UsageError):
            raise
        own.add_note(str(failure))
        raise own from None
