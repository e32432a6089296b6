import os
import signal
import sys

import pytest

from overlap.timeline import read_trace

WORLD = """
import sys
import overlap

async def main(rank):
    return rank.world_size

if __name__ == "__main__":
    print(*overlap.run(main, ranks=2), *sys.argv)
"""


def test_the_command_line_wins_over_the_program(overlap, script):
    assert overlap("run", "--ranks", "3", script(WORLD), "a", "--ranks=9") == (0, "3 3 3 train.py a --ranks=9\n", "")


def test_the_program_decides_what_is_left_open(overlap, script):
    assert overlap("run", script(WORLD)) == (0, "2 2 train.py\n", "")


def test_the_option_wins_over_the_environment(overlap, script, monkeypatch):
    monkeypatch.setenv("OVERLAP_RANKS", "5")
    assert overlap("run", script(WORLD))[1] == "5 5 5 5 5 train.py\n"
    assert overlap("run", "--ranks", "1", script(WORLD))[1] == "1 train.py\n"
    assert os.environ["OVERLAP_RANKS"] == "5"


def test_settings_reach_the_program_as_variables(overlap, script):
    show = "import os; print(*(os.environ.get('OVERLAP_' + n) for n in ('CLUSTER', 'TIMEOUT_S', 'ALGORITHM', 'RANKS')))"
    options = ("--cluster", "trn2.48xlarge x2", "--timeout", "3", "--algorithm", "ring")
    assert overlap("run", *options, script(show)) == (0, "trn2.48xlarge x2 3.0 ring None\n", "")
    assert "OVERLAP_CLUSTER" not in os.environ


def test_a_program_finds_what_python_gives_it(overlap, script, tmp_path):
    script("value = 'helper'", "sub/helper.py")
    body = "import sys, helper, __main__\nprint(__name__, __main__.own, sys.path[0], helper.value)"
    before = sys.argv[:], sys.path[:]
    assert overlap("run", script("own = 1\n" + body, "sub/train.py")) == (
        0,
        f"__main__ 1 {tmp_path / 'sub'} helper\n",
        "",
    )
    assert (sys.argv, sys.path) == before
    sys.modules.pop("helper")


def test_a_module_runs_with_its_arguments(overlap, script):
    script(WORLD, "trainer_module.py")
    code, out, err = overlap("run", "--ranks", "1", "-m", "trainer_module", "--ranks", "7")
    assert (code, err) == (0, "")
    assert out.split()[0] == "1"
    assert out.split()[2:] == ["--ranks", "7"]


def test_a_package_runs_its_main(overlap, script):
    script("", "trainer_package/__init__.py")
    script("print(__name__)", "trainer_package/__main__.py")
    assert overlap("run", "-m", "trainer_package") == (0, "__main__\n", "")


@pytest.mark.parametrize(("body", "code", "err"), [("7", 7, ""), ("None", 0, ""), ("'no data'", 1, "no data\n")])
def test_the_programs_exit_is_honoured(overlap, script, body, code, err):
    assert overlap("run", script(f"import sys; sys.exit({body})")) == (code, "", err)


# -- traces ------------------------------------------------------------------------------------------------------


def test_each_run_writes_a_trace_of_its_own(overlap, script, tmp_path):
    twice = WORLD + "    overlap.run(main, ranks=3)\n"
    code, _, err = overlap("run", "--trace", "a.json", script(twice))
    told = "look at it with `overlap timeline a.json` or at ui.perfetto.dev"
    assert (code, err) == (0, f"overlap: trace in a.json (and a-2.json); {told}\n")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a-2.json", "a.json"]
    assert [read_trace(tmp_path / name).world_size for name in ("a.json", "a-2.json")] == [2, 3]


def test_a_trace_stays_where_it_was_asked_for(overlap, script, tmp_path):
    script("", "elsewhere/x")
    moved = WORLD.replace("import sys\n", "import os, sys\nos.chdir('elsewhere')\n")
    assert overlap("run", "--trace", "a.json", script(moved))[0] == 0
    assert (tmp_path / "a.json").exists()


def test_a_failed_run_tells_its_trace_before_the_error(overlap, script):
    body = "import overlap\nasync def main(rank):\n    raise ValueError('bad')\noverlap.run(main, ranks=1)"
    code, _, err = overlap("run", "--trace", "a.json", script(body))
    assert code == 1
    assert err.startswith("overlap: trace in a.json; look at it with")
    assert err.endswith("overlap: rank 0 failed at train.py:3: ValueError: bad\n")


def test_a_program_without_a_world_has_no_trace(overlap, script):
    told = "overlap: no trace in a.json: the program did not call overlap.run\n"
    assert overlap("run", "--trace", "a.json", script("pass")) == (0, "", told)


# -- what goes wrong ---------------------------------------------------------------------------------------------


def test_a_failed_rank_is_told_by_its_own_frames_and_one_line(overlap, script):
    body = """
import overlap
def deep(rank):
    raise ValueError(f"rank {rank.rank} is broken")
async def main(rank):
    if rank.rank == 1:
        deep(rank)
    await rank.barrier()
overlap.run(main, ranks=2)
"""
    code, out, err = overlap("run", script(body))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip() for line in lines if line.startswith("  File")] == [
        'File "train.py", line 7, in main',
        'File "train.py", line 4, in deep',
    ]
    assert lines[-2] == "ValueError: rank 1 is broken"
    assert lines[-1].startswith("overlap: rank 1 failed at train.py:4: ValueError: rank 1 is broken")


def test_an_error_outside_the_ranks_is_told_without_our_frames(overlap, script):
    code, _, err = overlap("run", script("def f():\n    return 1 / 0\nf()"))
    assert code == 1
    assert err.count("  File ") == 2
    assert err.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_wrong_arguments_of_run_are_one_line_with_the_place(overlap, script):
    code, out, err = overlap("run", script("import overlap\nasync def main(rank): ...\noverlap.run(main, ranks=-1)"))
    assert (code, out) == (2, "")
    assert err == "overlap: train.py:3: ranks: expected a positive integer, got -1\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "run: name a SCRIPT, or -m MODULE (`overlap run --help` explains)"),
        (("none.py",), "run: none.py: No such file or directory"),
        (("sub",), "run: sub: Is a directory"),
        (("broken.py",), "run: broken.py:2: not Python: '(' was never closed"),
        (("-m",), "run: -m needs a MODULE"),
        (("-m", "no_such_module_x"), "run: -m no_such_module_x: there is no such module to run"),
        (("-m", "hollow_package"), "run: -m hollow_package: there is no such module to run"),
        (("-m", "no_such_module_x.y"), "run: -m no_such_module_x.y: No module named 'no_such_module_x'"),
        (("--ranks", "0", "x.py"), "run: argument --ranks: expected a positive integer, got '0' (`overlap run --help`"),
        (("--timeout", "-1", "x.py"), "run: argument --timeout: expected a positive number of seconds, got '-1'"),
        (("--cluster", "nosuch", "x.py"), "unknown cluster 'nosuch'; known: "),
        (("--algorithm", "nosuch", "x.py"), "algorithm: 'nosuch' is unknown; known are direct"),
        (("--trace", "sub", "x.py"), "--trace: sub is a directory; name a file in it"),
        (("--trace", "/nowhere/a.json", "x.py"), "--trace: cannot write into /nowhere"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_start_is_one_line(overlap, script, argv, message):
    script("x = 1\nprint(", "broken.py")
    script("", "sub/x.py")
    script("", "hollow_package/__init__.py")
    code, out, err = overlap("run", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"overlap: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"\x00\x01", b"\xff\xfe\xff", b"\x7fELF\x02"])
def test_a_file_that_is_not_text_is_one_line(overlap, tmp_path, content):
    (tmp_path / "data.bin").write_bytes(content)
    code, _, err = overlap("run", "data.bin")
    assert code == 2
    assert err.startswith("overlap: run: data.bin")
    assert ": not Python: " in err
    assert err.count("\n") == 1


def test_a_package_that_lacks_an_import_is_not_called_missing(overlap, script):
    script("import no_such_module_x", "needy_package/__init__.py")
    script("", "needy_package/__main__.py")
    code, _, err = overlap("run", "-m", "needy_package")
    assert code == 1
    assert err.endswith("ModuleNotFoundError: No module named 'no_such_module_x'\n")


# -- as processes ------------------------------------------------------------------------------------------------


def test_streams_and_exit_code_of_a_process(process, script):
    child = process("run", "--ranks", "4", script(WORLD), FORCE_COLOR="1")
    assert (*child.communicate(), child.returncode) == ("4 4 4 4 train.py\n", "", 0)


def test_no_escape_sequences_in_failures(process, script):
    body = "import overlap\nasync def main(rank):\n    raise ValueError('bad')\noverlap.run(main, ranks=1)"
    child = process("run", script(body), NO_COLOR="1")
    out, err = child.communicate()
    assert (child.returncode, out) == (1, "")
    assert "\x1b" not in err


ENDLESS = """
import overlap

async def main(rank):
    for number in range(10**9):
        print(number)

overlap.run(main, ranks=1)
"""


def test_a_reader_that_leaves_is_no_error(process, script):
    child = process("run", script(ENDLESS), PYTHONUNBUFFERED="")
    assert child.stdout.readline() == "0\n"
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait() == 141


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 141), (["run", "train.py"], 3)])
def test_nobody_reading_from_the_start_is_no_error_and_hides_none(process, script, argv, code):
    script("import sys; print('x'); sys.exit(3)")
    reading, writing = os.pipe()
    os.close(reading)
    child = process(*argv, stdout=writing, PYTHONUNBUFFERED="")
    os.close(writing)
    assert (child.communicate()[1], child.returncode) == ("", code)


WAITING = """
import sys, trio, overlap

async def main(rank):
    print("up", flush=True)
    await trio.sleep_forever()

overlap.run(main, ranks=1)
"""


def test_ctrl_c_is_one_line_and_130(process, script):
    child = process("run", script(WAITING))
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate()
    assert (child.returncode, out, err) == (130, "", "overlap: interrupted\n")
