"""torch's own tests of backends, from its wheel, run on a backend that they do not know.

`python -m tests.pytorch.suite BACKEND SIZE [NAME ...]` runs the tests of these names, by default those that gloo passes
(`gloo_passes.txt`), on SIZE forked processes each, prints a line for each test, and ends with 1 if one has failed.

What `told_gloo.txt` lists are tests that name gloo: they run too, and what they ask for by name is ours.
"""

import logging
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def listed(name: str) -> dict[str, str]:
    """Return the tests that a file lists, with what stands behind them."""
    lines = (line.partition(":") for line in (HERE / name).read_text().splitlines() if line and line[0] != "#")
    return {test.strip(): reason.strip() for test, _, reason in lines}


def prepared(size: int) -> Any:
    """Import torch's tests as those of gloo: what they skip is decided while they are imported."""
    folder = tempfile.mkdtemp()
    for each in ("barrier", "test_dir"):
        os.mkdir(f"{folder}/{each}")
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(size),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/shared",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)  # else the forks have a pool whose threads are not there
    from torch.testing._internal.distributed import distributed_test

    logging.disable(logging.INFO)
    return distributed_test


def use(backend: str, tests: Any) -> None:
    """Let the tests run on a backend."""
    import overlap.torch  # noqa: F401 (registers itself)

    tests.BACKEND = backend


def cases(tests: Any) -> type[unittest.TestCase]:
    """Return torch's tests, as those of processes that are forked."""
    import torch

    told_gloo = {name for name, how in listed("told_gloo.txt").items() if how.startswith("branches")}

    class Forked(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, pipe: Any) -> None:
            if test_name in told_gloo:
                tests.BACKEND = "gloo"
            super().run_test(test_name, pipe)

    return Forked


class _Told(unittest.TestResult):
    """Prints what becomes of each test."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._tell("passed", test, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._tell("skipped", test, reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        super().addFailure(test, error)
        self._tell("failed", test, self.failures[-1][1])

    def addError(self, test: unittest.TestCase, error: Any) -> None:
        super().addError(test, error)
        self._tell("failed", test, self.errors[-1][1])

    def _tell(self, how: str, test: Any, why: str) -> None:
        print(f"{how:8} {time.monotonic() - self._began:5.1f} s {test._testMethodName}  {why}", flush=True)


def main(backend: str, size: int, names: list[str]) -> int:
    """Run tests; returns how many have failed or were skipped."""
    tests = prepared(size)
    use(backend, tests)
    case, told = cases(tests), _Told()
    passed = {name: where for name, where in listed("gloo_passes.txt").items() if where in ("", f"on {size} ranks")}
    wanted = names or list(passed)
    unittest.TestSuite(case(name) for name in wanted).run(told)
    missed = len(told.failures) + len(told.errors) + len(told.skipped)
    print(f"{backend}, {size} ranks: {told.testsRun - missed} of {len(wanted)} passed")
    return missed


if __name__ == "__main__":
    failed = main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    os._exit(bool(failed))  # what torch's tests leave behind is not ours to join
