"""torch's own test files, run on gloo and on overlap: which tests pass on gloo, and which of these on ours.

`python -m tests.pytorch.files FOLDER FILE ... [-k=NAME ...]` takes files of PyTorch's source (FOLDER is
`test/distributed` there), which no wheel has. It prints a table with a row for each file, and then each test that gloo
passes and ours does not, with the last line of its error.

Each file runs in a process of its own, its ranks are forks, and the files are not changed. Where a test asks for gloo
by name it gets ours. Where a test expects a sentence of gloo's, the type of the error counts: sentences are ours.
"""

import importlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1500


# Names of torch's test library that older files import, and the present ones.
_RENAMED = (
    ("common_utils", "sandcastle_skip_if", "skip_but_pass_in_sandcastle_if"),
    ("common_utils", "sandcastle_skip", "skip_but_pass_in_sandcastle"),
    ("common_distributed", "skip_if_rocm", "skip_if_rocm_multiprocess"),
)


def load(path: Path) -> Any:
    """Import a test file, beside its neighbours."""
    for library, old, new in _RENAMED:
        names = importlib.import_module(f"torch.testing._internal.{library}")
        if not hasattr(names, old):
            setattr(names, old, getattr(names, new))
    sys.path[:0] = [str(path.parent), str(path.parents[1] if path.parent.name != "distributed" else path.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def fork_ranks() -> None:
    """Let the ranks of tests be forks of this process: spawned ones would import torch again for each test."""
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    kind = common_distributed.MultiProcessTestCase
    fork = torch.multiprocessing.get_context("fork").Process
    kind._spawn_processes = lambda self, *_, **__: self._start_processes(fork)


def use_ours() -> None:
    """Give a test that asks for gloo by name our backend."""
    import torch.distributed as dist

    from overlap import connect
    from overlap.torch import ProcessGroup

    def named(backend: Any) -> Any:
        return re.sub(r"\bgloo\b", "overlap", backend) if isinstance(backend, str) else backend

    init, new = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, *args: Any, **more: Any) -> Any:
        return init(named(backend), *args, **more)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **more: Any) -> Any:
        return new(ranks, timeout, named(backend), *args, **more)

    class Options:
        """Takes the settings of gloo that a test makes."""

    def process_group(store: Any, rank: int, size: int, options: Any = None) -> Any:
        limit = getattr(options, "_timeout", dist.default_pg_timeout)
        limit = limit if hasattr(limit, "total_seconds") else type(dist.default_pg_timeout)(seconds=limit)
        made = connect(rank, size, store=store if size > 1 else None)
        return ProcessGroup(store, made.rank.world, limit, leave=made.close)

    process_group._Options = process_group.Options = Options  # type: ignore[attr-defined]
    process_group.create_device = process_group.create_default_device = lambda **_: None  # type: ignore[attr-defined]
    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group
        module.ProcessGroupGloo = process_group
    ProcessGroup.create_device = staticmethod(lambda **_: None)
    # Sentences are ours; the type of an error is what a program catches.
    kind = unittest.TestCase
    kind.assertRaisesRegex = lambda self, error, _, *args, **more: self.assertRaises(error, *args, **more)  # noqa: PT027


def tests_of(module: Any) -> Iterator[unittest.TestCase]:
    """Yield the tests of a file that need no GPU, those whose ranks are processes first."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    found = [case for suite in unittest.defaultTestLoader.loadTestsFromModule(module) for case in _cases(suite)]
    for case in sorted(found, key=lambda case: not isinstance(case, MultiProcessTestCase)):
        if not re.search(r"cuda|gpu|nccl|ucc|xpu|_mps", case.id(), re.IGNORECASE):
            yield case


def _cases(suite: Any) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestSuite):
        for each in suite:
            yield from _cases(each)
    else:
        yield suite


class _Told(unittest.TestResult):
    """Prints what becomes of each test, in a line."""

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell("passed", test, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._tell("skipped", test, reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._tell("failed", test, self._exc_info_to_string(error, test))

    addError = addFailure

    def _tell(self, how: str, test: unittest.TestCase, why: str) -> None:
        # The error of a rank is more than the sentence that its process has ended.
        errors = re.findall(r"^\w[\w.]*(?:Error|Exception|Exit).*$", why, re.MULTILINE)
        print(f"@{how} {test.id()} {(errors or [why.strip()])[-1][:300]}", flush=True)


def run_here(backend: str, path: Path, names: list[str]) -> None:
    """Run the tests of a file in this process."""
    fork_ranks()
    if backend != "gloo":
        use_ours()
    logging.disable(logging.INFO)
    module = load(path)
    told = _Told()
    for case in tests_of(module):
        if not names or any(name in case.id() for name in names):
            case.run(told)


def ran(backend: str, path: Path, names: list[str]) -> dict[str, tuple[str, str]]:
    """Run a file in a process of its own; return what became of each test, and why."""
    command = [sys.executable, "-m", __spec__.name, "--here", backend, str(path), *names]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    log = open(f"/tmp/files-{backend}-{path.stem}.log", "w+")  # noqa: SIM115
    with log:
        try:
            subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{path.name} on {backend}: stopped after {TIMEOUT_S} s", flush=True)
        log.seek(0)
        said = log.read()
    found = re.findall(r"^@(\w+) (\S+) ?(.*)$", said, re.MULTILINE)
    if not found:
        print(f"{path.name} on {backend} ran no test: {said[-500:]}", flush=True)
    return {test: (how, why) for how, test, why in found}


def main(folder: Path, files: list[str], names: list[str]) -> int:
    """Print the table; returns how many tests gloo passes and ours does not."""
    lost: list[tuple[str, str]] = []
    print(f"{'file':56} gloo  ours of these", flush=True)
    for file in files:
        theirs, ours = (ran(backend, folder / file, names) for backend in ("gloo", "overlap"))
        passed = [test for test, (how, _) in theirs.items() if how == "passed"]
        missed = [test for test in passed if ours.get(test, ("missing", ""))[0] != "passed"]
        print(f"{file:56} {len(passed):4}  {len(passed) - len(missed):4}", flush=True)
        lost += [(test, " ".join(ours.get(test, ("did not run", "")))) for test in missed]
    for test, why in lost:
        print(f"{test}: {why}")
    return len(lost)


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        run_here(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        sys.stdout.flush()
        os._exit(0)
    wanted = [word.removeprefix("-k=") for word in sys.argv[2:] if word.startswith("-k=")]
    sys.exit(bool(main(Path(sys.argv[1]), [word for word in sys.argv[2:] if word.endswith(".py")], wanted)))
