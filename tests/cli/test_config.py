import os
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import pytest

import overlap
from overlap import UsageError, trace_files
from overlap.cli.options import add_settings, given_settings, option_flag
from overlap.cli.parser import Parser
from overlap.config import RunConfig, resolve_config, setting_environment, unknown_variable_lines
from overlap.processes.place import member_variables
from overlap.settings import option
from overlap.units import parse_count
from tests.errors import error_of

FULL = RunConfig(
    ranks=4,
    trace="run.json",
    cluster="trn2.48xlarge x4",
    timeout_s=2.5,
    algorithm="ring",
    transport="efa",
    check="nan",
    rails=("eth0", "10.0.0.1"),
    peer_direct=False,
    unix=True,
    tls_cert="c.pem",
    tls_key="k.pem",
    tls_ca="a.pem",
    join_timeout_s=60.0,
)


def test_what_is_written_is_read_back():
    assert RunConfig.from_environment(FULL.variables()) == FULL


def test_unset_and_empty_leave_the_choice_to_the_program():
    empty = dict.fromkeys(FULL.variables(), "")
    assert RunConfig.from_environment({}) == RunConfig.from_environment(empty) == RunConfig()
    assert RunConfig().variables() == {}


INTEGERS, SECONDS = ("OVERLAP_RANKS", "integer"), ("OVERLAP_TIMEOUT_S", "number of seconds")


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *((INTEGERS, value) for value in ("0", "-1", "2.5", "two", "1e3", " ")),
        *((SECONDS, value) for value in ("0", "-1", "nan", "inf", "soon")),
    ],
)
def test_a_bad_number_is_named(setting, value):
    name, kind = setting
    error = error_of(UsageError, RunConfig.from_environment, {name: value})
    assert str(error) == f"{name}: expected a positive {kind}, got {value!r}"


@pytest.mark.parametrize(("text", "rails"), [("2", 2), ("eth0", ("eth0",)), ("eth0, eth1", ("eth0", "eth1"))])
def test_rails_are_a_number_or_interfaces(text, rails):
    assert RunConfig.from_environment({"OVERLAP_RAILS": text}).rails == rails


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "eth0,", "eth0,eth0", "eth0,2", " "])
def test_bad_rails_are_named(value):
    error = error_of(UsageError, RunConfig.from_environment, {"OVERLAP_RAILS": value})
    assert str(error).startswith("OVERLAP_RAILS: expected a positive number, or different interfaces such as ")
    assert str(error).endswith(f"got {value!r}")


@pytest.mark.parametrize(("text", "answer"), [("1", True), ("0", False), ("Yes", True), ("off", False)])
def test_yes_and_no(text, answer):
    assert RunConfig.from_environment({"OVERLAP_UNIX": text}).unix is answer


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OVERLAP_PEER_DIRECT", "2", "expected 1 or 0, got '2'"),
        (
            "OVERLAP_TRANSPORT",
            "tcp",
            "'tcp' is an unknown transport; known are auto, efa, neuronlink, shared_memory, sockets",
        ),
        ("OVERLAP_OUTAGE_S", "1_0", "expected a positive number of seconds, got '1_0'"),
        ("OVERLAP_JOIN_TIMEOUT_S", "0", "expected a positive number of seconds, got '0'"),
    ],
)
def test_a_bad_setting_is_named(name, value, message):
    assert str(error_of(UsageError, RunConfig.from_environment, {name: value})) == f"{name}: {message}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.5, "outage_s: expected from 1 to 15 seconds, got 0.5"),
        (16.0, "outage_s: expected from 1 to 15 seconds, got 16"),
        ("a", "outage_s: expected a positive number of seconds, got 'a'"),
    ],
)
def test_an_outage_is_as_long_as_a_run_can_last_through(given, message):
    check_outage = RunConfig.options()["outage_s"].check
    assert str(error_of(UsageError, check_outage, given)) == message
    assert all(check_outage(least_or_most) is None for least_or_most in (1, 15))


def test_a_variable_that_is_none_of_ours_is_told_once(overlap, script, monkeypatch):
    monkeypatch.setenv("OVERLAP_RANK", "7")
    monkeypatch.setenv("OVERLAP_COLOUR", "red")
    monkeypatch.setattr("overlap.processes.secret._removed", {})
    monkeypatch.setenv("OVERLAP_SECRET", "correct horse")
    program = script("import overlap\nasync def main(rank): ...\noverlap.run(main)")
    told = [
        "overlap: OVERLAP_COLOUR is no setting, and has no effect",
        "overlap: OVERLAP_RANK is no setting, and has no effect; did you mean OVERLAP_RANKS?",
    ]
    assert overlap("run", program)[2].splitlines() == told
    assert overlap("run", program)[2] == ""
    monkeypatch.setenv("OVERLAP_MEMBER_PID", "1")
    assert unknown_variable_lines() == []


def test_no_variable_of_a_launcher_is_unknown():
    held = dict.fromkeys(("secret", "listener"), 0)
    told = member_variables(node=0, nodes=2, ranks_per_node=1, endpoint=("", 0), job="", descriptors=held)
    assert (
        unknown_variable_lines({**told, **FULL.variables(), "OVERLAP_LIFELINE_FD": "3", "OVERLAP_STATUS_FD": "4"}) == []
    )


def test_imposed_settings_replace_the_environments_and_are_taken_back(monkeypatch):
    monkeypatch.setenv("OVERLAP_RANKS", "7")
    monkeypatch.setenv("OVERLAP_ALGORITHM", "mesh")
    monkeypatch.delenv("OVERLAP_CLUSTER", raising=False)
    with suppress(ZeroDivisionError), setting_environment(RunConfig(ranks=3, cluster="local")):
        assert RunConfig.from_environment() == RunConfig(ranks=3, cluster="local")
        raise ZeroDivisionError
    assert RunConfig.from_environment() == RunConfig(ranks=7, algorithm="mesh")
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
    with setting_environment(RunConfig()):
        path = str(tmp_path / name)
        assert [trace_files.next_path(path), trace_files.next_path(path)] == [Path(path), tmp_path / second]


def test_numbers_start_again_with_new_settings_and_only_written_traces_are_told(tmp_path):
    path = str(tmp_path / "run.json")
    for _ in range(2):
        with setting_environment(RunConfig()):
            first, second, third = (trace_files.next_path(path) for _ in range(3))
            assert third == tmp_path / "run-3.json"
            second.touch()  # of an earlier program
            trace_files.record_written(first)
            trace_files.record_written(third)
            assert trace_files.paths_given_out(path) == [first, second, third]
            assert trace_files.written_paths(path) == [first, third]


# -- who has said it ---------------------------------------------------------------------------------------------


def test_every_value_says_where_it_came_from(monkeypatch):
    monkeypatch.setenv("OVERLAP_RANKS", "3")
    asked = RunConfig.from_values(ranks=2, timeout_s=5.0, trace=None)
    wanted = resolve_config(print, (), asked)
    assert (wanted.ranks, wanted.timeout_s, wanted.trace) == (3, 5.0, None)
    assert wanted.sources == {"ranks": "OVERLAP_RANKS", "timeout_s": "argument"}
    launched = wanted.with_changes("torchrun", ranks=8)
    assert (launched.ranks, launched.sources["ranks"]) == (8, "torchrun")


def test_the_variables_of_an_imposed_configuration_were_said_by_its_options():
    with setting_environment(RunConfig.from_values("--ranks", ranks=3)):
        assert RunConfig.from_environment().sources == {"ranks": "--ranks"}
        os.environ["OVERLAP_RANKS"] = "4"  # by the program; the block takes it back
        assert RunConfig.from_environment().sources == {"ranks": "OVERLAP_RANKS"}


def test_errors_name_who_said_it_unless_it_was_the_program(overlap, script, monkeypatch):
    program = script("import overlap\nasync def main(rank): ...\noverlap.run(main, cluster='trn1.2xlarge', ranks=9)")
    place = "overlap: train.py:3: ranks: 9 do not fit on trn1.2xlarge, which has 2"
    advice = "; give fewer, or a larger cluster\n"
    assert overlap("run", program)[2] == place + advice
    assert overlap("run", "--ranks", "9", program)[2] == f"{place} (ranks: --ranks, cluster: argument){advice}"
    monkeypatch.setenv("OVERLAP_RANKS", "9")
    assert overlap("run", program)[2] == f"{place} (ranks: OVERLAP_RANKS, cluster: argument){advice}"


def test_the_configuration_is_shown_with_its_sources(overlap, monkeypatch):
    monkeypatch.setenv("OVERLAP_ALGORITHM", "ring")
    monkeypatch.setenv("OVERLAP_UNIX", "0")
    code, out, err = overlap("run", "--processes", "2", "--ranks-per-process", "3", "--no-bind", "--show-config")
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {name: rows[name].split() for name in ("processes", "ranks", "unix", "bind", "algorithm", "trace")} == {
        "processes": ["2", "--processes"],
        "ranks": ["6", "--ranks-per-process"],
        "unix": ["0", "OVERLAP_UNIX"],
        "bind": ["0", "--no-bind"],
        "algorithm": ["ring", "OVERLAP_ALGORITHM"],
        "trace": ["none", "is", "kept", "default"],
    }
    assert rows["join_timeout_s"].split() == ["60", "default"]
    assert not any(row.startswith("- ") for row in rows.values())
    assert list(rows) == [name for name, one in RunConfig.options().items() if one.read]


def test_the_launcher_is_shown_too(overlap, monkeypatch):
    for name, value in {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert overlap("run", "--show-config")[1].endswith("MPICH has started this process as number 3 of 4\n")


def test_a_transport_is_told_what_somebody_has_said():
    told = {"TRANSPORT": "efa", "RAILS": "eth0,eth1", "PEER_DIRECT": "0", "OUTAGE_S": "15"}
    told |= {"TLS_CERT": "c", "TLS_KEY": "k", "TLS_CA": "a"}
    config = RunConfig.from_environment({f"OVERLAP_{name}": value for name, value in told.items()})
    assert config.transport_options() == {"outage_s": 15.0, "rails": ("eth0", "eth1"), "peer_direct": False}
    assert config.tls_files() == ("c", "k", "a")
    assert (RunConfig().transport_options(), RunConfig().tls_files()) == ({}, None)


def test_some_tls_files_alone_are_refused(monkeypatch):
    monkeypatch.setenv("OVERLAP_TLS_KEY", "k")
    with pytest.raises(UsageError, match=r"^TLS needs three files: .*; missing: OVERLAP_TLS_CERT, OVERLAP_TLS_CA$"):
        resolve_config(print, (), RunConfig())


# -- one edit a setting ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class More(RunConfig):
    """A configuration with one setting more, and nothing else."""

    colour_depth: int | None = option(
        read=parse_count, metavar="N", help="how many bits", check=lambda bits: bits < 99 or no()
    )


def no():
    raise UsageError("colour_depth: too deep")


def test_a_field_is_all_there_is_to_a_setting(monkeypatch):
    parser = Parser("overlap run")
    add_settings(parser, More)
    assert "--colour-depth N" in parser.format_help()
    told = given_settings(parser.parse_args(["--colour-depth", "8"]), More)
    assert (told.colour_depth, told.sources) == (8, {"colour_depth": "--colour-depth"})
    assert told.variables() == {"OVERLAP_COLOUR_DEPTH": "8"}
    assert More.from_environment({"OVERLAP_COLOUR_DEPTH": "24"}).merged_over(told).colour_depth == 24
    assert f"{'colour_depth':<17} {'8':<50} --colour-depth" in told.lines()
    with pytest.raises(UsageError, match=r"^OVERLAP_COLOUR_DEPTH: expected a positive integer, got 'x'$"):
        More.from_environment({"OVERLAP_COLOUR_DEPTH": "x"})
    with pytest.raises(UsageError, match=r"^colour_depth: too deep$"):
        More(colour_depth=100).check_values()
    with setting_environment(told):
        assert More.from_environment() == told


def test_the_help_lists_every_option_and_every_variable(overlap):
    out = overlap("run", "--help-all")[1]
    for name, one in RunConfig.options().items():
        if one.read is not None:
            assert one.variable_only is not (f" {option_flag(name, one)} " in out)
            assert one.variable is (f"OVERLAP_{name.upper()}" in out)


def test_what_run_takes_is_part_of_the_configuration():
    own = {"main", "args", "clock", "transport"}  # `virtual` and `wires` are what becomes of the last two
    for front in (overlap.run, overlap.run_async):
        assert set(signature(front).parameters) - own <= set(RunConfig.options())
