import json
from importlib.metadata import PackageNotFoundError

import pytest

from overlap.cli.doctor import machine, network, page, software
from overlap.cli.doctor.finding import CheckResult
from overlap.cli.doctor.software import _packages, numbers, shadowing


def test_a_page_has_a_line_for_each_thing_and_counts_them(overlap):
    code, out, err = overlap("doctor")
    assert (code, err) == (0, "")
    for subject in ("python", "packages", "cores", "memory bandwidth", "sockets", "clock", "flight records"):
        assert any(line[6:].startswith(subject) for line in out.splitlines()), subject
    assert " good" in out.splitlines()[-1]
    assert all(len(line) <= 100 for line in out.splitlines() if "fix:" not in line)


def test_json_has_what_the_page_has(overlap):
    code, out, _ = overlap("doctor", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema_version"] == 2
    assert {"subject", "state", "text", "fix"} == set(document["findings"][0])
    assert any(one["subject"] == "packages" and "trio" in one["text"] for one in document["findings"])


def test_what_does_not_work_is_the_exit_code(overlap, monkeypatch):
    broken = CheckResult(subject="sockets", state="wrong", text="127.0.0.1 cannot be reached", fix="ip link set lo up")
    monkeypatch.setattr("overlap.cli.doctor.network.findings", lambda: [broken])
    code, out, _ = overlap("doctor")
    assert code == 1
    assert "WRONG sockets" in out
    assert "fix: ip link set lo up" in out
    assert out.splitlines()[-1].endswith("1 wrong")


def installed(name):
    found = {"trio": "0.31.0", "numpy": "2.10.0", "torch": "2.13.0+cpu"}
    if name not in found:
        raise PackageNotFoundError(name)
    return found[name]


def test_packages_are_missing_too_old_or_good():
    wanted = [
        "trio>=0.32",
        "numpy>=2.9.1",
        "rich>=13.7",
        'torch>=2.7; extra == "torch"',
        'ray>=2.60; extra == "ray"',
        'pytest>=9; extra == "test"',
        'overlap[ray]; extra == "test"',
    ]
    assert [(one.subject, one.state, one.fix) for one in _packages(wanted, installed)] == [
        ("trio", "wrong", 'pip install "trio>=0.32"'),
        ("rich", "wrong", 'pip install "rich>=13.7"'),
        ("ray", "missing", 'pip install ".[ray]"'),
        ("packages", "good", ""),
    ]
    assert list(_packages(wanted, installed))[-1].text == "numpy 2.10.0, torch 2.13.0+cpu"


@pytest.mark.parametrize(("text", "found"), [("2.13.0+cpu", (2, 13, 0)), ("0.5", (0, 5)), ("3.0rc1", (3, 0)), ("", ())])
def test_versions_are_compared_by_numbers(text, found):
    assert numbers(text) == found


def test_a_folder_with_one_of_our_names_is_told(tmp_path):
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "__init__.py").touch()
    assert [(one.subject, one.state) for one in shadowing([str(tmp_path)])] == [("topology", "note")]
    assert list(shadowing([])) == []


@pytest.mark.parametrize(
    ("case", "state", "words"),
    [
        ((4, 4, 0.5, None), "good", "4 of 4 cores, load 0.5"),
        ((4, 4, 4.5, None), "slow", "take turns"),
        ((4, 8, 0.5, 1.5), "slow", "a limit grants 1.5"),
        ((4, 8, 0.5, 4.0), "good", "4 of 8 cores"),
    ],
)
def test_cores(case, state, words):
    found = machine.cores(*case)
    assert found.state == state
    assert words in found.text


def test_a_clock_that_needs_a_system_call_is_slow():
    assert machine.clock("tsc", 1e-9, ["tsc", "hpet"]).state == "good"
    slow = machine.clock("hpet", 1e-9, ["tsc", "hpet"])
    assert slow.state == "slow"
    assert slow.fix == "echo tsc >/sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert machine.clock("hpet", 1e-9, ["hpet"]).state == "good"


def test_a_mailbox_that_is_not_compiled_is_told_with_what_it_needs():
    assert machine.engine_finding(True).state == "good"
    slow = machine.engine_finding(False)
    assert (slow.state, "C compiler" in slow.fix) == ("slow", True)


def test_few_descriptors_are_told():
    assert [one.fix for one in machine.limits(256)] == ["ulimit -n 1024"]
    assert [one.state for one in (*machine.limits(1024), *machine.limits(-1))] == ["good", "good"]


def test_rails_are_interfaces_that_are_up(tmp_path):
    for name, state, speed in [("eth0", "up", "25000"), ("eth1", "unknown", "-1"), ("eth2", "down", "10000")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(state)
        (tmp_path / name / "speed").write_text(speed)
    found = network.rails(["eth0", "eth1", "eth2"], tmp_path)
    assert found.text == "eth0 (25 Gbit/s), eth1; `--rails eth0,eth1` uses each"
    assert network.rails(["eth2"], tmp_path).state == "note"


def test_records_of_dead_processes_are_counted(tmp_path):
    assert [one.state for one in network.records(tmp_path)] == ["good"]
    (tmp_path / "job-attempt0-world0-process0-1.flight").write_bytes(bytes(2048))
    (found,) = network.records(tmp_path)
    assert (found.state, found.fix) == ("note", f"rm -r {tmp_path}")
    assert found.text.startswith("1 of runs that failed, 2 KiB")


def test_findings_of_a_page_are_wrapped_to_its_width():
    lines = list(page([CheckResult(subject="limits", state="note", text="word " * 30, fix="ulimit")], 60))
    assert lines[0].startswith("note  limits              word")
    assert lines[1].startswith(" " * 26 + "word")
    assert max(map(len, lines)) <= 60


def test_a_missing_loopback_is_wrong(monkeypatch):
    def refuses(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("socket.create_server", refuses)
    found = next(iter(network.findings()))
    assert (found.subject, found.state) == ("sockets", "wrong")


def test_the_software_of_this_process_is_good():
    assert not [one for one in software.findings() if one.state == "wrong"]


def test_a_record_that_goes_while_it_is_looked_at_is_none(tmp_path, monkeypatch):
    (tmp_path / "a.flight").touch()
    monkeypatch.setattr(network, "_is_process_alive", lambda path: path.unlink())
    [finding] = network.records(tmp_path)
    assert finding.text == "none of failed runs"


def test_an_option_that_only_the_help_of_another_word_names_is_not_what_was_meant(overlap):
    """The help of why named `--flight-dir` of `overlap run`."""
    code, _, err = overlap("why", "--flight-dir", "x")
    assert (code, "did you mean --flight-dir" in err) == (2, False)
