import json
from importlib.metadata import PackageNotFoundError

import pytest

from overlap.cli import doctor
from overlap.cli.doctor import CheckResult, check_packages, check_shadowing, page_lines, parse_version_numbers


def test_a_page_has_a_line_for_each_thing_and_counts_them(overlap):
    code, out, err = overlap("doctor")
    assert (code, err) == (0, "")
    for subject in ("python", "packages", "cores", "host engine", "sockets", "limits", "flight records"):
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
    monkeypatch.setattr("overlap.cli.doctor.run_checks", lambda: [broken])
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
    assert [(one.subject, one.state, one.fix) for one in check_packages(wanted, installed)] == [
        ("trio", "wrong", 'pip install "trio>=0.32"'),
        ("rich", "wrong", 'pip install "rich>=13.7"'),
        ("ray", "missing", 'pip install ".[ray]"'),
        ("packages", "good", ""),
    ]
    assert list(check_packages(wanted, installed))[-1].text == "numpy 2.10.0, torch 2.13.0+cpu"


@pytest.mark.parametrize(("text", "found"), [("2.13.0+cpu", (2, 13, 0)), ("0.5", (0, 5)), ("3.0rc1", (3, 0)), ("", ())])
def test_versions_are_compared_by_numbers(text, found):
    assert parse_version_numbers(text) == found


def test_a_folder_with_one_of_our_names_is_told(tmp_path):
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "__init__.py").touch()
    assert [(one.subject, one.state) for one in check_shadowing([str(tmp_path)])] == [("topology", "note")]
    assert list(check_shadowing([])) == []


@pytest.mark.parametrize(
    ("case", "state", "words"),
    [
        ((4, 0.5, None), "good", " cores, load 0.5"),
        ((4, 4.5, None), "slow", "take turns"),
        ((4, 0.5, 1.5), "slow", "a limit grants 1.5"),
        ((4, 0.5, 4.0), "good", "4 of "),
    ],
)
def test_cores(case, state, words):
    found = doctor.check_cores(*case)
    assert found.state == state
    assert words in found.text


def test_a_mailbox_that_is_not_compiled_is_told_with_what_it_needs():
    assert doctor.check_engine(True).state == "good"
    slow = doctor.check_engine(False)
    assert (slow.state, "C compiler" in slow.fix) == ("slow", True)
    assert doctor.check_engine(False, stale=True).text.startswith("was compiled for another version of overlap; ")


def test_few_descriptors_are_told():
    assert doctor.check_limits(256).fix == "ulimit -n 1024"
    assert [doctor.check_limits(files).state for files in (1024, -1)] == ["good", "good"]


def test_records_of_dead_processes_are_counted(tmp_path):
    assert doctor.check_records(tmp_path).state == "good"
    (tmp_path / "job-attempt0-world0-process0-1.flight").write_bytes(bytes(2048))
    found = doctor.check_records(tmp_path)
    assert (found.state, found.fix) == ("note", f"rm -r {tmp_path}")
    assert found.text.startswith("1 of runs that failed, 2 KiB")


def test_findings_of_a_page_are_wrapped_to_its_width():
    lines = list(page_lines([CheckResult(subject="limits", state="note", text="word " * 30, fix="ulimit")], 60))
    assert lines[0].startswith("note  limits              word")
    assert lines[1].startswith(" " * 26 + "word")
    assert max(map(len, lines)) <= 60


def test_a_missing_loopback_is_wrong(monkeypatch):
    def refuses(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("socket.create_server", refuses)
    found = doctor.check_sockets()
    assert (found.subject, found.state) == ("sockets", "wrong")


def test_the_software_of_this_process_is_good():
    assert not [one for one in doctor.run_checks() if one.state == "wrong"]


def test_a_record_that_goes_while_it_is_looked_at_is_none(tmp_path, monkeypatch):
    (tmp_path / "a.flight").touch()
    monkeypatch.setattr(doctor, "_is_process_alive", lambda path: path.unlink())
    assert doctor.check_records(tmp_path).text == "none of failed runs"


def test_an_option_that_only_the_help_of_another_word_names_is_not_what_was_meant(overlap):
    """The help of why named `--flight-dir` of `overlap run`."""
    code, _, err = overlap("why", "--flight-dir", "x")
    assert (code, "did you mean --flight-dir" in err) == (2, False)
