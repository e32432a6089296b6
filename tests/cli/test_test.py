"""`overlap test`."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

MUSEUM = Path(__file__).parents[1] / "museum"

pytest.importorskip("torch", reason="torch is not installed")


def test_a_wrong_program_is_explained_and_a_right_one_is_well(overlap):
    program = str(MUSEUM / "saved_by_one.py")
    code, out, _ = overlap("test", program, "--ranks", "4", "--seeds", "2")
    assert code == 1
    assert out.startswith(f"{program} is wrong with 2 ranks, seed 0\nskipped: rank 1 skipped barrier #1 of group ")
    assert f"repeat: overlap test {program} --ranks 2\n" in out
    code, out, _ = overlap("test", "--ranks", "4", program, "--seeds", "2", "--", "--right")
    assert code == 0
    assert out.startswith(f"{program} is well with 4 ranks and 2 seeds: 12 operations, ")


@pytest.mark.slow
def test_weights_faults_traces_and_output(overlap, tmp_path):
    program = str(MUSEUM / "other_seeds.py")
    code, out, _ = overlap("test", program, "--ranks", "2", "--same")
    assert (code, "weights differ: before the first update 'weight' differs: rank 1 (" in out) == (1, True)
    assert overlap("test", program, "--ranks", "2", "--same", "--", "--right")[0] == 0
    code, out, _ = overlap("test", program, "--ranks", "2", "--faults", "die(rank=1, at=1)", "--", "--right")
    told = "die(rank=1, at=1) happened, and the run ended so: rank lost: rank 1 died at all_reduce #1"
    assert (code, told in out) == (0, True)
    code, out, _ = overlap("test", program, "--ranks", "2", "--faults", "die(rank=1, at=99)", "--", "--right")
    assert (code, "unused fault: die(rank=1, at=99) did not happen: rank 1 begins 4 operations" in out) == (1, True)
    out = overlap("test", program, "--ranks", "2", "--faults", "die", "--seeds", "2", "--", "--right")[1]
    assert "faults happened, and 2 runs ended with the rank that was hit" in out


@pytest.mark.slow
def test_weights_are_compared_at_the_end_unless_each_update_is_asked_for(overlap):
    program = str(MUSEUM.parent / "testing" / "programs" / "diloco.py")
    assert overlap("test", program, "--same")[0] == 0
    code, out, _ = overlap("test", program, "--same-updates")
    assert (code, "2 ranks: weights differ: after update 1 (diloco.py:26), and not before, 'weight'" in out) == (
        1,
        True,
    )


def test_a_failure_names_the_command_that_repeats_it(overlap):
    program = str(MUSEUM / "saved_by_one.py")
    told = ("--cluster", "trn2.3xlarge", "--seed", "3", "--faults", "late(rank=1, at=0)", "--timeout", "50")
    code, out, _ = overlap("test", program, "--ranks", "2", *told)
    [line] = [line for line in out.splitlines() if line.startswith("repeat: ")]
    words = shlex.split(line.removeprefix("repeat: "))
    assert words == ["overlap", "test", program, "--ranks", "2", *told]
    assert overlap(*words[1:])[:2] == (code, out)


def test_a_module_is_run_as_python_does(overlap, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[:])
    (tmp_path / "tested_package").mkdir()
    (tmp_path / "tested_package" / "__init__.py").write_text("")
    (tmp_path / "tested_package" / "part.py").write_text("WORD = 'part'")
    (tmp_path / "tested_package" / "__main__.py").write_text(
        "import sys, torch.distributed as dist\nfrom .part import WORD\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
        "print(WORD, sys.argv[1:])\ndist.destroy_process_group()\nif sys.argv[1:] == ['wrong']: sys.exit(3)"
    )
    code, out, err = overlap("test", "-m", "tested_package", "--ranks", "2", "-v", "--", "right")
    assert (code, out.splitlines()[:2], err) == (0, ["[r0] part ['right']", "[r1] part ['right']"], "")
    out = overlap("test", "-m", "tested_package", "--", "wrong")[1]
    assert "repeat: overlap test -m tested_package --ranks 2 -- wrong" in out
    told = "overlap: test: -m absent_package: there is no such module to run; install it, or correct the name\n"
    assert overlap("test", "-m", "absent_package") == (2, "", told)


NEVER_ENDS = """
import ctypes
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    WAITS
dist.barrier()
model = DistributedDataParallel(torch.nn.Linear(8, 2))
futures = []
model.register_comm_hook(None, lambda state, bucket: futures.append(torch.futures.Future()) or futures[-1])
model(torch.randn(4, 8)).sum().backward()  # waits for the futures with a lock that the end of the model takes
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ("pass", "never ends: rank 0 is still computing at program.py:14 after 25 s of real time: "),
        ("ctypes.CDLL(None).pause()", "never ends: rank 1 is still computing at program.py:9 after 25 s of real time"),
        ("ctypes.PyDLL(None).pause()", 'program.py", line 9 in <module>'),  # no Python can run any more
    ],
)
def test_a_rank_that_waits_in_c_for_ever_is_named_and_the_command_ends(tmp_path, waits, told):
    (tmp_path / "program.py").write_text(NEVER_ENDS.replace("WAITS", waits))
    command = [sys.executable, "-m", "overlap", "test", "program.py", "--ranks", "3", "--timeout", "25"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert told in done.stdout + done.stderr


def test_a_program_that_is_missing_is_refused(overlap):
    assert overlap("test", "none.py") == (
        2, "", "overlap: program: cannot read none.py: No such file or directory; pass the path of a program\n"
    )  # fmt: skip
