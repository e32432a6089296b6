"""The page and the examples on testing: what they show is what is printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from overlap.testing import Ranks, RanksFailed
from tests import interpreters
from tests.errors import error_of

ROOT = Path(__file__).parents[2]

NUMPY = """\
left: rank 1 has finished its program; ranks 0, 2-7 wait for it in all_reduce #2 of group 'world' \
(22_testing_ranks.py:26)
repeat: ranks.run(wrong, ranks=8, cluster='trn1.32xlarge')
right: 0.0% exposed, 786,432 bytes sent by a rank
"""

PYTORCH = """\
right: same weights on all ranks: True, 75% exposed
mismatch: rank 0 called all_reduce #6 of group 'world' (23_testing_pytorch.py:24) with float32 (1,), op='sum', where \
ranks 1-7 called all_reduce #6 of group 'world' (23_testing_pytorch.py:37) with float32 (676,), op='sum' (sizes differ)
"""


def printed_by(*argv: object) -> str:
    done = interpreters.run(*argv, cwd=ROOT, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return str(done.stdout)


@pytest.mark.slow
def test_the_example_with_numpy() -> None:
    """22_testing_ranks."""
    assert printed_by(ROOT / "examples" / "22_testing_ranks.py") == NUMPY


@pytest.mark.slow
def test_its_tests_pass() -> None:
    where = ("-p", "no:cacheprovider", "-n", "0", "-q", "examples/22_testing_ranks.py")
    command = [sys.executable, "-m", "pytest", "-p", "pytest_overlap", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert "2 passed" in done.stdout


@pytest.mark.slow
def test_the_example_with_pytorch() -> None:
    """23_testing_pytorch."""
    pytest.importorskip("torch", reason="torch is not installed")
    assert printed_by(ROOT / "examples" / "23_testing_pytorch.py") == PYTORCH


def test_the_page_begins_with_a_wrong_program_and_what_its_test_says(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    page = (ROOT / "docs" / "testing.md").read_text()
    [program] = re.findall(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)
    [told] = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(f"# train.py\n{program}")
    assert str(error_of(RanksFailed, Ranks(tmp_path).program, "train.py", ranks=4)) == told
