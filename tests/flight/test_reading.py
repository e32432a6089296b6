"""Reading flight records: what is none is refused in one line, and damage is never more than that."""

import json
import os
import platform
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import overlap
from overlap import UsageError
from overlap.cli import main as command
from overlap.explain.hang import PAGE_LINES, judge_stuck_job
from overlap.flight.folder import is_alive
from overlap.flight.layout import START_AT, TEXT_LIMIT_BYTES, read_text, write_text
from overlap.flight.reading import read_flight
from overlap.kernel_facts import start_ticks
from tests import interpreters
from tests.errors import error_of

from . import KILLED


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No line is wrapped."""
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """The bytes of a real record."""
    folder = tmp_path_factory.mktemp("records")

    async def main(rank):
        with rank.step(1):
            await rank.all_reduce(np.ones(2))
        raise ValueError("no")

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OVERLAP_FLIGHT_DIR", str(folder))
        with pytest.raises(overlap.RankFailedError):
            overlap.run(main, ranks=1)
    (file,) = folder.iterdir()
    return file.read_bytes()


def refusal(file, data):
    file.write_bytes(data)
    return str(error_of(UsageError, read_flight, file))


def test_what_is_no_record_is_refused(tmp_path, sample):
    file = tmp_path / "x.flight"
    assert refusal(file, b"") == f"{file}: is empty, so it is no flight record; leave it out"
    assert refusal(file, b"PNG" + sample) == f"{file}: is no flight record; leave it out"


def test_what_is_cut_off_is_refused(tmp_path, sample):
    file = tmp_path / "x.flight"
    assert refusal(file, sample[:5000]) == f"{file}: is cut off: it has 5000 of {len(sample)} bytes; leave it out"


def test_what_is_too_long_is_refused(tmp_path, sample):
    file = tmp_path / "x.flight"
    told = f"{file}: is damaged: it has {len(sample) + 1} bytes, and should have {len(sample)}; leave it out"
    assert refusal(file, sample + b"x") == told


def test_what_another_version_has_written_is_refused(tmp_path, sample):
    file = tmp_path / "x.flight"
    told = f"{file}: was written by another version of overlap (format 7, this reads 4); read it with that version"
    assert refusal(file, sample[:8] + b"\x07" + sample[9:]) == told


def test_what_is_damaged_is_refused(tmp_path, sample):
    file = tmp_path / "x.flight"
    told = refusal(file, sample[:516] + b"]" + sample[517:])
    assert told.startswith(f"{file}: is damaged: JSONDecodeError: ")


def test_what_is_not_there_is_refused(tmp_path):
    error = error_of(UsageError, read_flight, tmp_path / "x")
    assert str(error) == f"{tmp_path / 'x'}: No such file or directory; name a record that can be read"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), max_size=20))
def test_damage_of_any_kind_is_refused_or_read(tmp_path, sample, damage):
    file, data = tmp_path / "x.flight", bytearray(sample)
    for where, what in damage:
        at = int(where**4 * len(data))  # more of it at the beginning, where there is something to damage
        data[at : at + len(what)] = what
    file.write_bytes(data[: len(sample)])
    with suppress(UsageError):
        assert len(read_flight(file).ranks) == 1


@pytest.mark.slow
def test_the_files_of_two_nodes_tell_which_was_killed(tmp_path, capsys):
    (tmp_path / "train.py").write_text(KILLED)
    command_line = ["run", "--processes", "2", "--flight-dir", "records", "--job-id", "j", "train.py"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    interpreters.run("-m", "overlap", *command_line, cwd=tmp_path, env=environ, timeout=120)
    assert command(["why", str(tmp_path / "records")]) == 0
    head, *told, _, _, first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"job j: 2 ranks, 2 processes, \S*train.py, begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", head)
    assert re.fullmatch(
        r"rank 1: process 1 \(pid \d+ on .+\) ended without a word: killed, or by os._exit; it had last called recv #0 "
        r"from rank 0 \(train.py:\d+\); rank 0 waits for it in all_reduce #3 of group 'world' \(train.py:12\)",
        " ".join(told),
    )
    assert re.fullmatch(r" +1 +1 +3 +[\d.]+ m?s +in its program", first)
    assert re.fullmatch(r" +0 +0 +3 +[\d.]+ m?s +all_reduce #3 of group 'world' \(train.py:12\) +1", second)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_FLIGHT_DIR", str(tmp_path / "records"))
    (tmp_path / "records").mkdir()
    return tmp_path / "records"


def test_the_last_run_is_judged(folder, sample, capsys):
    (folder / "a.flight").write_bytes(sample)
    assert command(["why"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("job process-")
    assert ": 1 rank, 1 process, " in out[0]
    assert out[1].startswith("rank 0 failed: ")
    assert out[3].split() == ["rank", "process", "for", "doing"]


def test_files_that_cannot_be_read_cost_one_line_each(folder, sample, capsys):
    (folder / "a.flight").write_bytes(sample)
    (folder / "b.flight").write_bytes(sample[:100])
    (folder / "c.flight").write_text("hello")
    assert command(["why", str(folder)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"overlap: why: {folder / 'b.flight'}: is cut off: it has 100 of {len(sample)} bytes; leave it out",
        f"overlap: why: {folder / 'c.flight'}: is no flight record; leave it out",
    ]


def test_many_files_that_cannot_be_read_are_counted(folder, sample, capsys):
    (folder / "a.flight").write_bytes(sample)
    for index in range(10):
        (folder / f"b{index}.flight").write_text("hello")
    assert command(["why"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[7:] == [
        f"overlap: why: {folder / 'b7.flight'}: is no flight record; leave it out",
        "overlap: why: and 2 files more that cannot be read",
    ]


def test_without_any_record_it_says_so(folder, capsys):
    assert command(["why"]) == 2
    assert capsys.readouterr().err == (
        f"overlap: why: no flight records in {folder}: no run has failed here, or they are elsewhere\n"
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_record_that_its_run_removes_meanwhile_costs_no_line(folder, sample, capsys, monkeypatch, kept):
    def vanishing(file):
        if str(file).endswith("b.flight"):
            os.unlink(file)
        return read_flight(file)

    monkeypatch.setattr("overlap.flight.records.read_flight", vanishing)
    (folder / "b.flight").write_bytes(sample)
    if kept:
        (folder / "a.flight").write_bytes(sample)
    assert command(["why", str(folder)]) == (0 if kept else 2)
    err = capsys.readouterr().err
    none = f"overlap: why: no flight records in {folder}: no run has failed here, or they are elsewhere\n"
    assert err == ("" if kept else none)


def test_with_foreign_files_only_it_names_them(folder, capsys):
    (folder / "c.flight").write_text("hello")
    assert command(["why", str(folder / "c.flight")]) == 2
    assert capsys.readouterr().err == f"overlap: why: {folder / 'c.flight'}: is no flight record; leave it out\n"


def renamed(sample, job, folder):
    """Return a record as of another job, that began in a folder."""
    start = json.loads(read_text(sample, START_AT, TEXT_LIMIT_BYTES))
    written = bytearray(sample)
    write_text(written, START_AT, json.dumps({**start, "job": job, "folder": str(folder)}), TEXT_LIMIT_BYTES)
    return bytes(written)


def judged(capsys, *words):
    """Return the job that is judged, and the reason for it."""
    assert command(["why", *words]) == 0
    out = capsys.readouterr().out.splitlines()
    return out[0].partition(":")[0], out[-1]


def test_several_runs_are_told_apart(folder, sample, capsys):
    (folder / "a.flight").write_bytes(sample)
    (folder / "b.flight").write_bytes(sample.replace(b'"attempt": 0', b'"attempt": 1'))
    told = "(of 2 runs in these files this is the last; name the files of another to see that)"
    assert judged(capsys, str(folder))[1] == told


def test_the_last_run_of_this_directory_is_judged(folder, sample, capsys):
    """Others of the machine may have begun later."""
    for name, began_in in [("a", "/elsewhere"), ("b", os.getcwd()), ("c", "/elsewhere")]:
        (folder / f"{name}.flight").write_bytes(renamed(sample, name, began_in))
    because = "(of 3 runs in these files this is your last that began in this directory; name the files of another to "
    assert judged(capsys) == ("job b", because + "see that)")
    (folder / "b.flight").unlink()
    because = "(of 2 runs in these files this is your last (it began in /elsewhere), as none of yours began in this "
    assert judged(capsys) == ("job c", because + "directory; name the files of another to see that)")


def test_runs_of_other_users_come_last(folder, sample, capsys, monkeypatch):
    for name in "ab":
        (folder / f"{name}.flight").write_bytes(renamed(sample, name, os.getcwd()))
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    monkeypatch.setattr("os.stat", partial(read_stat, {folder / "b.flight": owner + 1}))
    assert judged(capsys)[0] == "job b"
    (folder / "b.flight").unlink()
    (folder / "c.flight").write_bytes(renamed(sample, "c", "/elsewhere"))
    because = "(of 2 runs in these files this is the last, of another user (it began in /elsewhere), as none of "
    assert judged(capsys) == (
        "job c",
        because + "yours began in this directory; name the files of another to see that)",
    )


def read_stat(owners, path, stat=os.stat, **how):
    found = stat(path, **how)
    owner = owners.get(Path(path)) if isinstance(path, str) else None
    return found if owner is None else os.stat_result([*found[:4], owner, *found[5:]])


def test_a_pipe_among_records_is_passed_over(folder, sample, capsys):
    (folder / "a.flight").write_bytes(sample)
    os.mkfifo(folder / "b.flight")
    assert judged(capsys)[0].startswith("job process-")


def test_a_process_id_that_is_used_again_is_no_running_job() -> None:
    """A record is of a process that began when it says."""
    host, pid = platform.node()[:100], os.getpid()
    assert is_alive(host, pid, start_ticks(pid))
    assert not is_alive(host, pid, str(int(start_ticks(pid)) + 1))
    assert not is_alive(f"{host}-other", pid, start_ticks(pid))
    assert not is_alive(host, pid, "")


def test_a_folder_with_records_and_dumps_of_torch_has_both_verdicts(folder, sample):
    (folder / "a.flight").write_bytes(sample)
    (folder / "dump_0").write_text(json.dumps({"version": "2.10", "pg_config": {}, "entries": []}))
    hang = judge_stuck_job([folder])
    assert [each.verdict for each in hang.also] == ["failed", "nobody"]
    assert "; torch: cannot be told: no rank waits for another" in hang.sentence
    assert len(hang.page) <= PAGE_LINES
