import os
import re
import signal
import subprocess
import sys

import pytest

from overlap import RankFailedError, StallError, UsageError, __version__
from overlap.cli import COMMANDS, GONE, main
from overlap.launch import launcher, report
from overlap.launch.output import OutputError


def test_without_arguments_the_commands_are_listed(overlap):
    code, out, err = overlap()
    assert (code, err) == (0, "")
    assert out == overlap("--help")[1]
    for name, summary in COMMANDS.items():
        assert re.search(rf"^ +{name}\s+{re.escape(summary[:40])}", out, re.M)


@pytest.mark.parametrize("started", ["module", "script"])
def test_an_interrupt_while_modules_are_loaded_ends_the_command_without_a_word(started, tmp_path):
    """Trio is the first thing that it loads and that it does not bring along."""
    (tmp_path / "trio.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    script = tmp_path / "overlap"  # as pip writes it
    script.write_text("import sys\nfrom overlap.cli import main\nsys.exit(main())\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, *(["-m", "overlap"] if started == "module" else [str(script)]), "demo"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT  # which shells call 130
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_once_loaded_the_command_takes_interrupts_as_python_does():
    code = "import signal; signal.signal(2, signal.SIG_DFL); from overlap.cli import main; main(['--help']); "
    asked = "print(signal.getsignal(2) is signal.default_int_handler)"
    done = subprocess.run([sys.executable, "-c", code + asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_the_overview_loads_no_command():
    loaded = "import sys; from overlap.cli import main; main(['--help']); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()
    needed = {"overlap.cli.output", "overlap.cli.parser"}
    assert {m for m in modules if m == "rich" or m.startswith("overlap.cli.")} == needed


@pytest.mark.everyday(4)
@pytest.mark.parametrize("option", ["--help", "--help-all"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_which_comes_before_what_it_requires(overlap, name, option):
    code, out, err = overlap(name, option)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: overlap {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen(overlap, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    assert len(overlap(name, "--help")[1].splitlines()) <= 24


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_two_examples(overlap, name):
    examples = overlap(name, "--help")[1].partition("\nexamples:\n")[2]
    assert len(re.findall(rf"^  overlap {name}\b", examples, re.MULTILINE)) >= 2


def test_help_is_shown_as_it_is_written(overlap):
    line = "\n    wall = compute only + overlapped + exposed + kept + copy + queued + idle\n"
    assert line in overlap("timeline", "--help-all")[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_narrow_terminal_but_for_commands_to_be_copied(overlap, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    lines = overlap(name, "--help")[1].splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  overlap ")] == []


@pytest.mark.parametrize("former", GONE)
def test_a_command_that_went_says_what_to_do(overlap, former):
    assert overlap(former) == (2, "", f"overlap: `overlap {former}` is gone: {GONE[former]}\n")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["topology", "trn1.32xlarge", "--group", "0"], ": 1 rank, 1 disjoint ring\n"),
        (["plan", "all_reduce", "--bytes", "4", "--cluster", "local"], " float32 on 1 rank (0) of local\n"),
        (["simulate", "--cluster", "local", "--ranks", "1", "train.py"], "local, 1 rank, virtual time\n"),
    ],
)
def test_one_rank_is_not_several(overlap, script, argv, told):
    script("import overlap\nasync def main(rank): await rank.barrier()\noverlap.run(main)")
    code, out, err = overlap(*argv)
    assert (code, err) == (0, "")
    assert told in out


def test_the_version_is_told(overlap):
    code, out, err = overlap("--version")
    assert (code, out, err) == (0, f"overlap {__version__}\n", "")


# -- stdout that knows ASCII only --------------------------------------------------------------------------------


WORDS = """
import overlap
async def main(rank):
    with rank.step(0):
        await rank.compute(abs, 1, name="größe", seconds=1e-3)
        await rank.all_reduce(1.0 * rank.rank, name="Σ")
if __name__ == "__main__":
    overlap.run(main, ranks=2, clock="virtual", trace="t.json")
    print("done")
"""
MACHINE = """
extends = "trn1.32xlarge"
name = "größer"
[[rules]]
id = "even"
kind = "multiple"
sizes = [2]
text = "gerade Größen"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("topology", "mine.toml"),
        ("plan", "all_reduce", "--bytes", "1MiB", "--cluster", "mine.toml", "--group", "0-7"),
        ("simulate", "--cluster", "mine.toml", "--ranks", "8", "train.py"),
        ("timeline", "t.json"),
    ],
    ids=" ".join,
)
def test_what_users_name_is_written_where_only_ascii_can_be(overlap, ran, script, argv):
    script(WORDS)
    script(MACHINE, "mine.toml")
    if argv[0] == "timeline":
        overlap("run", "train.py")
    code, out, err = ran(*argv, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (code, "Traceback" in err) == (0, False)
    assert out.isascii()
    assert out


# -- failures ----------------------------------------------------------------------------------------------------


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


NESTED_INTERRUPT = BaseExceptionGroup("", [KeyboardInterrupt()])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("x: wrong\n  like this"), 2, "overlap: x: wrong; like this\n"),
        (KeyboardInterrupt(), 130, "overlap: interrupted\n"),
        (BaseExceptionGroup("", [ValueError(), NESTED_INTERRUPT]), 130, "overlap: interrupted\n"),
        (
            StallError(2.0, ["rank 0: x"]),
            1,
            "overlap: the world did not finish within timeout_s=2; raise timeout_s if the program is only slow\n"
            "  rank 0: x\n",
        ),
        (SystemExit(None), 0, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(256), 0, ""),
        (SystemExit("no data"), 1, "no data\n"),
        (BaseExceptionGroup("", [SystemExit(4)]), 4, ""),
        (ExceptionGroup("", [ExceptionGroup("", [UsageError("x: wrong")])]), 2, "overlap: x: wrong\n"),
    ],
)  # fmt: skip
def test_what_is_told_and_the_exit_code(capsys, error, code, text):
    assert report.report_error(raised(error)) == code
    assert capsys.readouterr() == ("", text)


def test_several_errors_are_all_shown(capsys):
    assert report.report_error(raised(ExceptionGroup("both", [ValueError("one"), KeyError("two")]))) == 1
    told = capsys.readouterr().err
    assert "ValueError: one" in told
    assert "KeyError: 'two'" in told


def rank_failed(cause):
    return RankFailedError(rank=1, cause=raised(cause), where="", doing=[], others={}, world_size=2)


@pytest.mark.parametrize(("exit_code", "code"), [(5, 5), (0, 1), (None, 1)])
def test_a_rank_that_exits_decides_the_code_but_is_never_a_success(capsys, exit_code, code):
    assert report.report_error(raised(rank_failed(SystemExit(exit_code)))) == code
    assert capsys.readouterr().err.endswith(f"overlap: rank 1 failed: SystemExit: {exit_code}\n")


def test_of_a_rank_that_exits_there_is_no_traceback(capsys):
    assert report.report_error(raised(rank_failed(SystemExit("no data")))) == 1
    assert capsys.readouterr().err == "no data\noverlap: rank 1 failed: SystemExit: no data\n"


def test_what_no_line_of_the_program_has_raised_is_told_without_ours(overlap, script, capsys):
    script("import overlap\ndef main(rank):\n    pass\noverlap.run(main, ranks=1)\n")
    code, out, err = overlap("run", "train.py")
    told = "main: expected an async function, but main(rank) returned NoneType (train.py:2)"
    assert (code, out, err) == (1, "", f"overlap: rank 0 failed: UsageError: {told}\n")


def test_of_several_errors_in_a_nursery_the_last_line_tells_the_first(overlap, script):
    lines = [
        "import overlap, trio",
        "async def fail(why):",
        "    raise ValueError(why)",
        "async def main(rank):",
        "    async with trio.open_nursery() as nursery:",
        "        nursery.start_soon(fail, 'no data')",
        "        nursery.start_soon(fail, 'no data')",
        "overlap.run(main, ranks=1)",
    ]
    script("\n".join(lines))
    code, _, err = overlap("run", "train.py")
    assert (code, err.splitlines()[-1]) == (
        1, "overlap: rank 0 failed at train.py:3: ValueError: no data, and 1 more"
    )  # fmt: skip


def test_a_broken_pipe_of_the_programs_own_is_not_hidden(capfd):
    assert report.report_error(raised(rank_failed(BrokenPipeError(32, "Broken pipe")))) == 1
    assert "overlap: rank 1 failed: BrokenPipeError" in capfd.readouterr().err


LOST = "overlap: cannot write the output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.everyday(1)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        (["--help"], ""),
        (["topology", "trn2.48xlarge"], ""),  # more than the buffer takes
        pytest.param(["topology", "trn2.48xlarge"], "1", marks=pytest.mark.slow),
        (["run", "train.py"], ""),  # from a rank
        pytest.param(["demo", "--steps", "1", "--ranks", "2"], "", marks=pytest.mark.slow),
        (["run", "--processes", "2", "train.py"], ""),  # from several processes at once
        pytest.param(["run", "--processes", "2", "train.py"], "1", marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written_is_told_in_one_line(process, script, argv, unbuffered):
    script("import overlap\nasync def main(rank): print('x', flush=True)\noverlap.run(main)")
    with open("/dev/full", "w") as full:
        child = process(*argv, stdout=full, PYTHONUNBUFFERED=unbuffered)
    told = child.communicate()[1]
    assert (child.returncode, told) == (1, LOST)


def test_a_full_file_of_the_programs_own_is_not_the_output(capsys):
    assert report.report_error(raised(OSError(28, "No space left on device"))) == 1
    assert capsys.readouterr().err.endswith("OSError: [Errno 28] No space left on device\n")


def test_what_the_system_refuses_to_the_launcher_is_reported(monkeypatch, overlap, script):
    monkeypatch.setenv("OVERLAP_SECRET", "no such folder")
    monkeypatch.setattr(launcher, "write_to_nameless_file", os.rmdir)  # has no frame that could be the program's
    script("import overlap\nasync def main(rank): pass\noverlap.run(main)")
    code, _, err = overlap("run", "--processes", "2", "train.py")
    assert (code, err) == (1, "overlap: FileNotFoundError: [Errno 2] No such file or directory: b'no such folder'\n")


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["demo", "--steps", "1", "--ranks", "2"], marks=pytest.mark.slow),
        ["simulate", "--cluster", "trn1.2xlarge", "train.py"],
    ],
)
def test_a_drawing_that_nobody_reads_is_no_error(process, script, argv):
    script("import overlap\nasync def main(rank): await rank.barrier()\noverlap.run(main)")
    reading, writing = os.pipe()
    os.close(reading)
    child = process(*argv, stdout=writing)
    os.close(writing)
    errors = [line for line in child.communicate()[1].splitlines() if not line.startswith("overlap: simulating ")]
    assert (errors, child.returncode) == ([], 141)


def test_an_interrupt_in_a_command_is_130(overlap, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("overlap.cli.timeline.read_trace", interrupted)
    assert overlap("timeline", "x.json") == (130, "", "overlap: interrupted\n")


def test_an_error_of_our_own_keeps_its_frames(overlap, monkeypatch):
    monkeypatch.setattr("overlap.cli.timeline.read_trace", None)
    code, _, err = overlap("timeline", "x.json")
    assert code == 1
    assert f"timeline{os.sep}__init__.py" in err
    assert err.endswith("TypeError: 'NoneType' object is not callable\n")


def test_main_reads_the_arguments_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overlap", "nosuch"])
    assert main() == 2
    assert "'nosuch' is not a command" in capsys.readouterr().err


def test_broken_pipes_of_several_nodes_are_one():
    from overlap.launch.report import unwrap_groups

    pipe, other = BrokenPipeError(32, "Broken pipe"), ValueError("no")
    assert unwrap_groups(ExceptionGroup("all", [pipe, ExceptionGroup("inner", [BrokenPipeError()])])) is pipe
    full = OutputError("the output", OSError(28, "No space left on device"))
    assert unwrap_groups(ExceptionGroup("all", [full, OutputError("the output", OSError(28))])) is full
    both = ExceptionGroup("all", [pipe, other])
    assert unwrap_groups(both) is both
    assert unwrap_groups(ExceptionGroup("all", [other])) is other


_PROGRAM = """
import overlap

async def main(rank):
    if rank.rank == 1:
        raise ValueError("no data")
    await rank.barrier()

overlap.run(main, ranks=2)
"""


@pytest.fixture
def python(tmp_path):
    """Return a function that runs a program with Python itself, as `train.py`."""

    def run(text, **variables):
        (tmp_path / "train.py").write_text(text)
        command, environ = [sys.executable, tmp_path / "train.py"], os.environ | variables
        return subprocess.run(command, capture_output=True, text=True, env=environ)

    return run


@pytest.mark.slow
def test_python_reports_as_the_command_does(python, tmp_path, overlap):
    plain = python(_PROGRAM)
    _, _, told = overlap("run", str(tmp_path / "train.py"))
    assert (plain.returncode, plain.stderr) == (1, told)
    assert told.splitlines()[-1] == "overlap: rank 1 failed at train.py:6: ValueError: no data"
    assert not any("world.py" in line or "trio" in line for line in told.splitlines())


def test_python_ends_by_an_interrupt_as_any_program_does(python):
    ended = python(
        "import signal, overlap\n\nasync def main(rank):\n    signal.raise_signal(signal.SIGINT)\n"
        "    await rank.barrier()\n\noverlap.run(main, ranks=1)\n"
    )
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (-signal.SIGINT, "overlap: interrupted")


@pytest.mark.slow
def test_all_frames_are_shown_where_they_are_asked_for(python):
    full = python(_PROGRAM, OVERLAP_TRACEBACK="full").stderr
    assert "world.py" in full
    assert full.splitlines()[-1] == "overlap: rank 1 failed at train.py:6: ValueError: no data"


def test_a_mistake_in_a_call_is_one_line(python):
    told = python(_PROGRAM.replace("ranks=2", "ranks=0")).stderr
    assert told.endswith("train.py:9: ranks: expected a positive integer, got 0\n")
    assert len(told.splitlines()) == 1


@pytest.mark.everyday(1)
@pytest.mark.parametrize("raises", ["1 / 0", "raise KeyboardInterrupt"])
def test_errors_of_the_program_alone_are_shown_as_ever(python, raises):
    text = _PROGRAM.replace("overlap.run(main, ranks=2)", f"overlap.run(main, ranks=1)\n{raises}")
    assert python(text).stderr.startswith("Traceback (most recent call last):")


@pytest.mark.slow
def test_a_hook_of_the_program_stays(python):
    hook = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n"
    assert python(hook + _PROGRAM).stderr == "mine\n"


# -- help --------------------------------------------------------------------------------------------------------


def test_rare_options_are_shown_by_help_all_alone(overlap):
    short, full = overlap("run", "--help")[1], overlap("run", "--help-all")[1]
    assert "--ranks" in short
    assert "--processes" in short
    assert "--checksums" not in short
    assert "--no-checksums" in full
    assert set(re.findall(r"^  (--[a-z-]+)", short, re.M)) < set(re.findall(r"^  (--[a-z-]+)", full, re.M))
    assert overlap("run", "--ranks", "2", "--help-all")[1] == full


@pytest.mark.parametrize("command", [["run"], ["simulate", "--cluster", "trn2.48xlarge"]])
def test_an_option_behind_a_script_that_reads_none_is_told(overlap, tmp_path, command):
    script = tmp_path / "votes.py"
    script.write_text("import sys\nprint(sys.argv)\n")
    theirs = ["--ranks", "3", "--epochs", "--", "--ranks=4"]
    assert "--ranks" not in overlap(*command, str(script), *theirs)[2]
    script.write_text("print(2)\n")
    _, _, err = overlap(*command, str(script), *theirs)
    assert err.splitlines()[:1] == [
        f"overlap: {command[0]}: --ranks is an argument of {script}, which reads none itself; options of "
        f"`overlap {command[0]}` stand before the script"
    ]
