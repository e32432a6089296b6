import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from overlap import why
from overlap.cli.processes import _BOOT
from overlap.timeline import read_trace
from tests.cli.conftest import ROOT
from tests.interpreters import free_port

WORLD = """
import sys
import overlap

async def main(rank):
    return rank.world_size

if __name__ == "__main__":
    print(*overlap.run(main, ranks=2), *sys.argv)
"""
QUIET_WORLD = WORLD.replace("print(", "str((").replace("sys.argv)", "sys.argv))")
FAILING = "import overlap\nasync def main(rank):\n    raise ValueError('bad')\noverlap.run(main, ranks=1)"


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


# -- nodes -------------------------------------------------------------------------------------------------------

PLACE = """
import os
from overlap.processes.place import find_place
print(find_place() and (find_place().ranks, find_place().node), os.environ.get("OVERLAP_RANKS"))
"""


def test_a_program_that_waits_for_a_launcher_is_told_how_to_start_it(overlap, script):
    said = "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected"
    code, _, err = overlap("run", script(f"raise ValueError({said!r})"))
    assert code == 1
    assert err.splitlines()[-1].startswith("`overlap run --processes N` starts N processes")


@pytest.mark.parametrize("options", [("--nnodes", "1"), ("--nnodes=1", "--node-rank=0", "--rdzv-endpoint=a:1")])
def test_one_node_is_this_process(overlap, script, options):
    assert overlap("run", *options, "--ranks-per-process", "3", script(PLACE)) == (0, "None 3\n", "")


def test_nnodes_divides_the_processes_of_another_launcher_into_hosts(overlap, script, monkeypatch):
    for name, value in {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert overlap("run", script(PLACE)) == (0, "(range(3, 4), 0) None\n", "")
    assert overlap("run", "--ranks", "8", script(PLACE)) == (0, "(range(6, 8), 0) 8\n", "")
    assert overlap("run", "--ranks-per-process", "2", script(PLACE)) == (0, "(range(6, 8), 0) 8\n", "")
    assert overlap("run", "--nnodes", "4", "--ranks-per-process", "2", script(PLACE)) == (0, "(range(6, 8), 3) 8\n", "")
    assert "OVERLAP_NNODES" not in os.environ
    assert overlap("run", "--nnodes", "2", script(PLACE)) == (0, "(range(3, 4), 1) None\n", "")
    assert overlap("run", "--nnodes", "2", "--processes", "2", script(PLACE)) == (0, "(range(3, 4), 1) None\n", "")
    for options in (["--nnodes", "3"], ["--processes", "3"], ["--nnodes", "2", "--node-rank", "0"]):
        assert overlap("run", *options, script(PLACE)) == (2, "", (
            f"overlap: {' '.join(options)}: MPICH has started this process as number 3 of 4; leave out the options, or "
            "the launcher\n"
        ))  # fmt: skip


def test_ctrl_c_while_a_process_still_imports_is_told_by_nobody_but_its_launcher(tmp_path):
    """Also where what is imported would swallow an exception, as callbacks of the import system do."""
    (tmp_path / "overlap").mkdir()
    (tmp_path / "overlap" / "cli.py").write_text("main = int")
    swallowed = "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    pass\n"
    (tmp_path / "overlap" / "__init__.py").write_text(swallowed)
    argv = [sys.executable, "-c", _BOOT.format(root=str(tmp_path))]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


NO_RANKS = "ranks: expected a positive integer, got 0"
GONE = """
import overlap
async def main(rank):
    if rank.rank == 0:
        await rank.barrier()
    raise ValueError("no")
overlap.run(main, ranks=2)
"""


@pytest.mark.parametrize(
    ("program", "code", "last"),
    [
        (GONE, 1, "overlap: rank 1 failed at train.py:6: ValueError: no"),
        ("import overlap\noverlap.run(print, ranks=0)", 2, f"overlap: {{path}}:2: {NO_RANKS}"),
    ],
)
def test_a_current_folder_that_is_gone_hides_no_error(overlap, script, tmp_path, monkeypatch, program, code, last):
    path = tmp_path / script(program)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended, _, err = overlap("run", str(path))
    assert (ended, err.splitlines()[-1]) == (code, last.format(path=path))


def test_a_process_that_the_system_does_not_start_is_one_line(overlap, script, monkeypatch):
    started, start = [], subprocess.Popen

    def one(*args, **options):
        if started:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        started.append(start(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", one)
    code, _, err = overlap("run", "--processes", "2", script("import time; time.sleep(60)"))
    assert (code, err) == (
        2,
        "overlap: process 1 cannot be started: Too many open files; start fewer, or allow more (ulimit -u, -n)\n",
    )
    assert [process.returncode for process in started] == [-signal.SIGKILL]


@pytest.mark.slow
def test_processes_are_one_node_and_share_its_ranks(ran, script):
    """One process a rank, on a cluster whose nodes have more: a node for each would be no such machine."""
    program = script(
        "import os, numpy, overlap\n"
        "async def main(rank):\n"
        "    pids = await rank.all_gather(numpy.array([os.getpid()]))\n"
        "    print(rank.rank, len(set(pids.tolist())), rank.world_size)\n"
        "overlap.run(main)\n"
    )
    code, out, err = ran(
        "run", "--ranks", "4", "--processes", "2", "--cluster", "trn1.32xlarge", "--no-prefix", program
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{rank} 2 4" for rank in range(4)]


SIZES = """
import os, overlap
async def main(rank):
    await rank.barrier()
    print(rank.rank, rank.local_rank, rank.world_size, os.environ["WORLD_SIZE"])
overlap.run(main, ranks=4)
overlap.run(main)
overlap.run(main, ranks=6)
"""


HOSTS = """
import numpy, overlap
async def main(rank):
    print(rank.rank, rank.node, rank.local_rank)
overlap.run(main, ranks=4)
"""


@pytest.mark.slow
def test_processes_of_one_host_stand_for_the_hosts_that_the_cluster_names(ran, script):
    code, out, err = ran("run", "--processes", "2", "--cluster", "local x2", "--no-prefix", script(HOSTS))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 0 0", "1 0 1", "2 1 0", "3 1 1"]


@pytest.mark.slow
def test_the_words_of_torchrun_start_the_processes_of_each_host(process, script):
    program = script(HOSTS)
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes", "2", "--processes", "2", "--rdzv-endpoint", endpoint, "--no-prefix", "--node-rank"]
    runs = [process("run", *options, host, program) for host in "01"]
    outs = [run.communicate(timeout=60) for run in runs]
    assert [(sorted(out.splitlines()), err) for out, err in outs] == [
        (["0 0 0", "1 0 1"], ""),
        (["2 1 0", "3 1 1"], f"overlap: node 1 waits for the other nodes, at {endpoint}\noverlap: node 1 has joined\n"),
    ]


@pytest.mark.slow
def test_a_node_that_waits_for_others_says_so_and_that_it_has_joined(process, script):
    program = script(QUIET_WORLD)
    endpoint = f"127.0.0.1:{free_port()}"
    start = ("run", "--nnodes", "2", "--rdzv-endpoint", endpoint, "--no-prefix", "--node-rank")
    second = process(*start, "1", program)
    assert second.stderr.readline() == f"overlap: node 1 waits for the other nodes, at {endpoint}\n"
    first = process(*start, "0", program)
    assert (first.communicate(timeout=60), second.communicate(timeout=60)) == (
        ("", ""),
        ("", "overlap: node 1 has joined\n"),
    )


@pytest.mark.slow
def test_the_program_says_how_many_ranks_are_spread_over_processes(ran, script):
    code, out, err = ran("run", "--processes", "2", "--no-prefix", script(SIZES))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(
        f"{rank} {rank} {size} {size}" for size in (4, 2, 6) for rank in range(size)
    )


def test_one_process_has_as_many_ranks_as_its_program_says(overlap, script):
    code, out, err = overlap("run", "--processes", "1", script(SIZES.replace(', os.environ["WORLD_SIZE"]', "")))
    assert (code, len(out.splitlines()), err) == (0, 4 + 2 + 6, "")


@pytest.mark.slow
def test_ranks_of_a_program_that_processes_cannot_share_are_refused(ran, script):
    program = script(SIZES)
    assert ran("run", "--processes", "3", "--no-prefix", program) == (2, "", (
        f"overlap: {program}:6: ranks: 4 ranks cannot be divided among --processes 3; set a multiple of 3 by --ranks\n"
    ))  # fmt: skip


@pytest.mark.slow
def test_a_lost_process_is_named_with_the_ranks_that_the_program_says(ran, script):
    program = "import os, overlap\nasync def main(rank):\n    await rank.barrier()\n    if rank.rank == 2:\n"
    program += "        os._exit(3)\n    await rank.barrier()\noverlap.run(main, ranks=4)\n"
    code, _, err = ran("run", "--processes", "2", "--no-prefix", script(program))
    assert code == 3
    assert "process 1 (ranks 2-3, pid " in err


def test_a_program_that_only_one_node_could_read_is_refused(overlap, script, monkeypatch):
    with open(script("print('ran')"), "rb") as source, open(os.dup(0), "rb") as stdin:
        os.dup2(source.fileno(), 0)
        try:
            told = overlap("run", "--processes", "2", "/dev/stdin")
        finally:
            os.dup2(stdin.fileno(), 0)
    message = "run: /dev/stdin: every process reads the program for itself; with --processes name a file"
    assert told == (2, "", f"overlap: {message}\n")


# -- traces ------------------------------------------------------------------------------------------------------


def test_each_run_writes_a_trace_of_its_own(overlap, script, tmp_path):
    twice = WORLD.replace("    return", "    await rank.barrier()\n    return") + "    overlap.run(main, ranks=3)\n"
    code, _, err = overlap("run", "--trace", "a.json", script(twice))
    told = "look at it with `overlap timeline a.json` or at ui.perfetto.dev"
    first, verdict = err.splitlines()
    assert (code, first) == (0, f"overlap: trace in a.json (and a-2.json); {told}")
    assert verdict == f"overlap: {why(tmp_path / 'a-2.json').verdict}"
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["a-2.json", "a.json"]
    assert [read_trace(tmp_path / name).world_size for name in ("a.json", "a-2.json")] == [2, 3]


def test_a_trace_stays_where_it_was_asked_for(overlap, script, tmp_path):
    script("", "elsewhere/x")
    moved = WORLD.replace("import sys\n", "import os, sys\nos.chdir('elsewhere')\n")
    assert overlap("run", "--trace", "a.json", script(moved))[0] == 0
    assert (tmp_path / "a.json").exists()


def test_a_failed_run_tells_its_trace_before_the_error(overlap, script):
    code, _, err = overlap("run", "--trace", "a.json", script(FAILING))
    assert code == 1
    assert err.startswith("overlap: trace in a.json; look at it with")
    assert err.endswith("overlap: rank 0 failed at train.py:3: ValueError: bad\n")


def test_a_trace_goes_down_a_pipe(ran, script):
    _, out, err = ran("run", "--trace", "/dev/stdout", script(QUIET_WORLD))
    assert err.startswith("overlap: trace in /dev/stdout; ")
    assert json.loads(out)[0]["args"]["world_size"] == 2


def test_bad_settings_are_told_by_the_name_under_which_they_were_given(overlap, script, monkeypatch):
    program = script(WORLD)
    for name, value, told in (
        ("TRACE", "/nonexist/x", "OVERLAP_TRACE: there is no folder /nonexist; make it"),
        ("CLUSTER", "nix", "OVERLAP_CLUSTER: unknown cluster 'nix'; known: "),
        ("ALGORITHM", "nix", "algorithm: 'nix' is unknown; known are "),
    ):
        monkeypatch.setenv(f"OVERLAP_{name}", value)
        code, out, err = overlap("run", program)
        assert (code, out, err.startswith(f"overlap: {told}")) == (2, "", True)
        monkeypatch.delenv(f"OVERLAP_{name}")
    assert err.endswith(" (algorithm: OVERLAP_ALGORITHM)\n")


def test_what_an_error_tells_does_not_move_the_cursor(overlap, script):
    body = (
        "import overlap\nasync def main(rank):\n    raise ValueError('\\0\\x1b[2J\\nmore')\noverlap.run(main, ranks=1)"
    )
    told = r"overlap: rank 0 failed at train.py:3: ValueError: \x00\x1b[2J ..."
    assert overlap("run", script(body))[2].splitlines()[-1] == told
    expected = "overlap: run: \\x1b[2J.py: No such file or directory; name a script that can be read\n"
    assert overlap("run", "\x1b[2J.py") == (2, "", expected)


def test_a_program_without_a_world_has_no_trace(overlap, script):
    told = "overlap: no trace in a.json: the program did not call overlap.run\n"
    assert overlap("run", "--trace", "a.json", script("pass")) == (0, "", told)


def test_a_connection_has_a_trace_also_if_it_is_closed_after_the_program(overlap, script):
    body = "import overlap\nworld = overlap.connect(0, 1)\nworld.rank.all_reduce(1.0).result()\n"
    code, out, err = overlap("run", "--trace", "a.json", script(body + "world.close()"))
    assert (code, out, err.splitlines()[0].startswith("overlap: trace in a.json; ")) == (0, "", True)
    assert overlap("run", "--trace", "b.json", script(body + "import sys\nsys.left_open = world")) == (0, "", "")
    vars(sys).pop("left_open").close()


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


def test_streams_and_exit_code_of_a_process(ran, script):
    assert ran("run", "--ranks", "4", script(WORLD), FORCE_COLOR="1") == (0, "4 4 4 4 train.py\n", "")


def test_no_escape_sequences_in_failures(ran, script):
    code, out, err = ran("run", script(FAILING), NO_COLOR="1")
    assert (code, out) == (1, "")
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


@pytest.mark.everyday(1)
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
    waits = rank.barrier() if rank.rank else trio.sleep_forever()
    if rank.rank:
        print("up", flush=True)
    await waits

overlap.run(main)
"""


def timeless(err):
    """Return output without the folder of the program, and without how long ranks have waited."""
    return re.sub(r"( at |\()\S*train.py", r"\1train.py", re.sub(r"has waited \d+ s for", "waits for", err))


def interrupted(child):
    """Interrupt a program once all of its ranks wait; returns what it says then, without times and folders."""
    while "Ctrl-C ends it" not in child.stderr.readline():
        pass
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130
    lines = timeless(err).splitlines()
    return lines[lines.index("overlap: interrupted") :]  # a slow computer may tell of the stall once more before


def test_ctrl_c_tells_who_waits_for_whom_and_ends_with_130(process, script):
    assert interrupted(process("run", "--stall-warning", "0.2", script(WAITING))) == [
        "overlap: interrupted",
        "  rank 0 has not come: its program is at train.py:8; rank 1 waits for it in barrier #0 of group 'world' "
        "(train.py:5)",
        "  rank 0: in its program, at train.py:8",
        "  rank 1: barrier #0 of group 'world' (train.py:5); waits for rank 0",
    ]


@pytest.mark.slow
def test_ctrl_c_over_several_nodes_tells_it_of_all_their_ranks(process, script):
    options = ("--processes", "2", "--ranks-per-process", "2", "--stall-warning", "0.5")
    assert interrupted(process("run", *options, script(WAITING))) == [
        "overlap: interrupted",
        "  rank 0 has not come: its program is at train.py:8; ranks 1-3 wait for it in barrier #0 of group 'world' "
        "(train.py:5)",
        "  rank 0: in its program, at train.py:8",
        *(f"  rank {rank}: barrier #0 of group 'world' (train.py:5); waits for rank 0" for rank in (1, 2, 3)),
    ]


BUSY = """
import threading, overlap

async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        threading.Event().wait(8)
    await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
def test_a_process_whose_loop_is_busy_is_the_odd_one_out_of_a_stall(ran, script):
    code, _, err = ran("run", "--processes", "2", "--stall-warning", "2", script(BUSY))
    assert code == 0, err
    busy, *stall = re.sub(r"for [\d.]+ s at", "for N s at", timeless(err)).splitlines()
    assert busy == (
        "[process 1] overlap: rank 1 has kept the event loop busy for N s at train.py:7; nothing else of it goes on; "
        "rank.compute or trio.to_thread would take that work off the loop; awaited at once, it still makes the others "
        "wait at their next operation: issue it early and await it late, or start it in a nursery"
    )
    assert stall[:4] == [
        "[process 0] overlap: no progress for 2 s: rank 1 has not come: it keeps its event loop busy at train.py:7; "
        "rank 0 waits for it in barrier #1 of group 'world' (train.py:8)",
        "[process 0]   rank 1: keeps its event loop busy at train.py:7",
        "[process 0]   rank 0: barrier #1 of group 'world' (train.py:8); waits for rank 1",
        "[process 0]   the run waits on; Ctrl-C ends it, as --stall-timeout SECONDS would",
    ]


COMPUTING = """
import time, overlap

def tokenise():
    time.sleep(4)

async def main(rank):
    await rank.barrier()
    if rank.rank == 1:
        await rank.compute(tokenise)
    await rank.barrier()

overlap.run(main)
"""


@pytest.mark.slow
def test_a_time_out_tells_of_a_node_that_computes_before_it_waits_for_it(ran, script):
    code, _, err = ran("run", "--processes", "2", "--timeout", "1", script(COMPUTING))
    assert code == 1, err
    lines = re.sub(r"has run \d+ s", "runs", timeless(err)).splitlines()
    assert (
        "[process 1] overlap: waiting for compute 'tokenise' (train.py:10) of rank 1 to return: "
        "a function cannot be interrupted"
    ) in lines
    first = lines.index(
        "overlap: the world did not finish within timeout_s=1: "
        "rank 1 has not come: it computes 'tokenise' (train.py:10); rank 0 waits for it in barrier #1 of group 'world' "
        "(train.py:11); raise timeout_s if the program is only slow"
    )
    assert lines[first + 1 : first + 3] == [
        "  rank 0: barrier #1 of group 'world' (train.py:11); waits for rank 1",
        "  rank 1: computes 'tokenise' (train.py:10)",
    ]


# -- files with the name of a package of ours ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topology", "transports"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_file_with_the_name_of_a_package_of_ours_is_named(overlap, script, tmp_path, name, file):
    script("", file.format(name))
    place = tmp_path / (f"{name}.py" if "/" not in file else name)
    message = f"{place} hides the package {name}, which overlap needs: rename it\n"
    for command in (["run", script("1")], ["simulate", script("1")], ["run", "--processes", "2", "-m", "train"]):
        assert overlap(*command) == (2, "", f"overlap: {command[0]}: {message}")


@pytest.mark.parametrize(("command", "kind"), [(["train.py"], "ImportError"), (["-m", "overlap", "run"], "overlap")])
def test_python_names_a_file_with_the_name_of_a_package_of_ours(script, tmp_path, command, kind):
    script("import overlap")
    script("", "topology.py")
    environ = os.environ | {"PYTHONPATH": ROOT}
    python = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, text=True)
    message = f"{kind}: {tmp_path / 'topology.py'} hides the package topology, which overlap needs: rename it"
    assert (python.returncode, python.stderr.splitlines()[-1]) == (1, message)


def test_a_program_in_a_clone_is_to_be_moved(overlap, script, tmp_path):
    script("", "topology/__init__.py")
    (tmp_path / "overlap").mkdir()
    line = f"overlap: run: {tmp_path / 'topology'} hides the package topology, which overlap needs: "
    assert overlap("run", script("1")) == (2, "", f"{line}move the program out of that clone of overlap\n")


def test_a_folder_without_code_hides_nothing(overlap, script, tmp_path):
    (tmp_path / "topology").mkdir()
    assert overlap("run", script(WORLD)) == (0, "2 2 train.py\n", "")
