"""Worlds of a bench: where their ranks are, in this process and in several, and what they find."""

import argparse
import json

import pytest

import overlap
from overlap.cli import bench
from overlap.cli.bench import measuring
from overlap.cli.bench.cases import Case, cases
from tests import interpreters


def parsed(*argv):
    parser = argparse.ArgumentParser()
    bench.fill(parser)
    return parser.parse_args(argv)


def test_ranks_by_default_are_one_on_each_node():
    for argv, ranks in (
        ((), 2),
        (("--processes", "2"), 2),
        (("--processes", "3"), 3),
        (("--processes", "2", "--ranks", "4"), 4),
    ):
        assert [[case.ranks for case in world] for world in cases(parsed("allr", "-b", "8", *argv))] == [[ranks]]


ARGV = ("allr", "-b", "8", "-e", "64K", "-f", "8192", "-w", "1", "-n", "2", "--json")


def measured(monkeypatch, capsys, *argv):
    """Measure in this process; return the exit code, the options of each world, and the rows."""
    worlds = []

    def run(main, *args, **options):
        worlds.append(options)
        return overlap.run(main, *args, **options)

    monkeypatch.setattr(measuring, "run", run)
    code = measuring.measure_and_print(parsed(*ARGV, *argv))
    return code, worlds, json.loads(capsys.readouterr().out)["rows"]


def test_all_rows_of_a_size_are_of_one_world(monkeypatch, capsys):
    code, worlds, rows = measured(monkeypatch, capsys, "--ranks", "2,4", "--algorithm", "ring")
    assert worlds == [{"ranks": ranks, "algorithm": "ring", "timeout_s": 1200} for ranks in (2, 4)]
    assert [(row["ranks"], row["size_bytes"], row["wrong"]) for row in rows] == [
        (ranks, nbytes, 0) for ranks in (2, 4) for nbytes in (8, 65536)
    ]
    assert code == 0


def test_wrong_elements_of_all_ranks_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(Case, "issuer", lambda case, rank, x, out: lambda: (rank.all_reduce(x, "max", out),))
    code, _, rows = measured(monkeypatch, capsys)
    assert [row["wrong"] for row in rows] == [4, 1 << 15]
    assert code == 1


def test_a_row_is_that_of_the_slowest_rank():
    [[case]] = cases(parsed("allr", "-b", "8", "-n", "2"))
    row = measuring.summarize(case, measuring.Sampling(iters=2), [[0, 1000, 2000], [1, 500, 3000]])
    assert (row.times, row.wrong) == (measuring.Times.of([20, 60]), 1)


@pytest.mark.slow
def test_two_processes_with_two_ranks_each_are_measured_and_right(tmp_path):
    options = ("-b", "8", "-e", "64K", "-f", "8192", "-n", "2", "-w", "0", "--processes", "2", "--ranks", "4,2")
    ended = interpreters.run("-m", "overlap", "bench", "allr", *options, "--json", cwd=tmp_path, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert told["processes"] == 2
    assert [(row["size_bytes"], row["ranks"], row["wrong"]) for row in told["rows"]] == [
        (nbytes, ranks, 0) for ranks in (4, 2) for nbytes in (8, 65536)
    ]
    assert all(row["median_ns"] > 0 for row in told["rows"])
