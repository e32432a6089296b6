import os
from contextlib import suppress
from pathlib import Path

import pytest

from overlap import UsageError
from overlap.settings import (
    Settings,
    asked_traces,
    from_environment,
    imposed,
    next_trace_path,
    trace_written,
    written_traces,
)

FULL = Settings(
    ranks=4,
    trace="run.json",
    cluster="trn2.48xlarge x4",
    timeout_s=2.5,
    algorithm="ring",
    transport="efa",
    rails=("eth0", "10.0.0.1"),
    peer_direct=False,
    unix=True,
    tls_cert="c.pem",
    tls_key="k.pem",
    tls_ca="a.pem",
    join_timeout_s=60.0,
)


def test_what_is_written_is_read_back():
    assert from_environment(FULL.variables()) == FULL


def test_unset_and_empty_leave_the_choice_to_the_program():
    empty = dict.fromkeys(FULL.variables(), "")
    assert from_environment({}) == from_environment(empty) == Settings()
    assert Settings().variables() == {}


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "two", "1e3", " "])
def test_a_bad_number_of_ranks_is_named(value):
    with pytest.raises(UsageError) as caught:
        from_environment({"OVERLAP_RANKS": value})
    assert str(caught.value) == f"OVERLAP_RANKS: expected a positive integer, got {value!r}"


@pytest.mark.parametrize(("text", "rails"), [("2", 2), ("eth0", ("eth0",)), ("eth0, eth1", ("eth0", "eth1"))])
def test_rails_are_a_number_or_interfaces(text, rails):
    assert from_environment({"OVERLAP_RAILS": text}).rails == rails


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "eth0,", "eth0,eth0", "eth0,2", " "])
def test_bad_rails_are_named(value):
    with pytest.raises(UsageError) as caught:
        from_environment({"OVERLAP_RAILS": value})
    assert str(caught.value).startswith("OVERLAP_RAILS: expected a positive number, or different interfaces such as ")
    assert str(caught.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(("text", "answer"), [("1", True), ("0", False), ("Yes", True), ("off", False)])
def test_yes_and_no(text, answer):
    assert from_environment({"OVERLAP_UNIX": text}).unix is answer


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OVERLAP_PEER_DIRECT", "2", "OVERLAP_PEER_DIRECT: expected 1 or 0, got '2'"),
        ("OVERLAP_TRANSPORT", "tcp", "OVERLAP_TRANSPORT: 'tcp' is unknown; known are auto, efa, mpi, neuronlink"),
        ("OVERLAP_JOIN_TIMEOUT_S", "0", "OVERLAP_JOIN_TIMEOUT_S: expected a positive number of seconds, got '0'"),
    ],
)
def test_a_bad_setting_is_named(name, value, message):
    with pytest.raises(UsageError) as caught:
        from_environment({name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_bad_timeout_is_named(value):
    with pytest.raises(UsageError) as caught:
        from_environment({"OVERLAP_TIMEOUT_S": value})
    assert str(caught.value) == f"OVERLAP_TIMEOUT_S: expected a positive number of seconds, got {value!r}"


def test_imposed_settings_replace_the_environments_and_are_taken_back(monkeypatch):
    monkeypatch.setenv("OVERLAP_RANKS", "7")
    monkeypatch.setenv("OVERLAP_ALGORITHM", "mesh")
    monkeypatch.delenv("OVERLAP_CLUSTER", raising=False)
    with suppress(ZeroDivisionError), imposed(Settings(ranks=3, cluster="local")):
        assert from_environment() == Settings(ranks=3, cluster="local")
        raise ZeroDivisionError
    assert from_environment() == Settings(ranks=7, algorithm="mesh")
    assert "OVERLAP_CLUSTER" not in os.environ


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("run.json", "run-2.json"),
        ("run.json.gz", "run-2.json.gz"),
        ("run.trace.json", "run-2.trace.json"),
        ("run.trace.json.gz", "run-2.trace.json.gz"),
        ("v1.2.txt", "v1.2-2.txt"),
        ("run", "run-2"),
        (".json", ".json-2"),
    ],
)
def test_later_traces_get_numbers(name, second, tmp_path):
    with imposed(Settings()):
        path = str(tmp_path / name)
        assert [next_trace_path(path), next_trace_path(path)] == [Path(path), tmp_path / second]


def test_numbers_start_again_with_new_settings_and_only_written_traces_are_told(tmp_path):
    path = str(tmp_path / "run.json")
    for _ in range(2):
        with imposed(Settings()):
            first, second, third = (next_trace_path(path) for _ in range(3))
            assert third == tmp_path / "run-3.json"
            second.touch()  # of an earlier program
            trace_written(first)
            trace_written(third)
            assert (asked_traces(path), written_traces(path)) == ([first, second, third], [first, third])
