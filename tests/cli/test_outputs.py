"""A file that cannot be written at the end is told of; what was found is shown all the same, and the code is 1."""

import os
import re

import pytest

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
FULL = "cannot write /dev/full: No space left on device; name another file\n"
PROGRAM = "import overlap\nasync def main(rank): await rank.barrier()\noverlap.run(main)"


def test_a_run_whose_trace_cannot_be_written_is_not_said_to_be_none(process, script):
    child = process("run", "--trace", "/dev/full", script(PROGRAM + "\nprint('done')"))
    out, err = child.communicate()
    assert (child.returncode, out) == (0, "done\n")
    assert f"train.py:3: TraceWarning: trace: {FULL}" in err
    assert "did not call" not in err


def test_neither_does_it_hide_why_the_program_failed(process, script):
    child = process("run", "--trace", "/dev/full", script(PROGRAM.replace("await rank.barrier()", "1 / 0")))
    _, err = child.communicate()
    assert child.returncode == 1
    assert re.search(r"\nZeroDivisionError: division by zero\noverlap: rank \d failed at train.py:2: ", err)
    assert err.endswith(f"\n  trace: {FULL}")


@pytest.mark.slow
def test_nor_does_it_of_several_processes(process, script):
    child = process("run", "--processes", "2", "--trace", "/dev/full", script(PROGRAM + "\nprint('done')"))
    out, err = child.communicate()
    assert (child.returncode, sorted(out.splitlines())) == (0, ["[process 0] done", "[process 1] done"])
    assert f"TraceWarning: trace: {FULL}" in err
