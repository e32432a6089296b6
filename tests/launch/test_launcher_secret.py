import os
import stat
import threading
from unittest.mock import Mock

import pytest

from overlap import UsageError
from overlap.processes.secret import ADVICE, generate, given_secret, hand_over, user_secret
from tests.threads import run_threads

HEX = "00ff" * 16


def private(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return {"OVERLAP_SECRET_FILE": str(path)}


def error_of(environ):
    with pytest.raises(UsageError) as caught:
        given_secret(environ)
    return str(caught.value)


def test_hexadecimal_digits_are_bytes_and_text_is_text(tmp_path):
    assert given_secret({"OVERLAP_SECRET": HEX}) == bytes.fromhex(HEX)
    assert given_secret({"OVERLAP_SECRET": "correct horse"}) == b"correct horse"
    assert given_secret(private(tmp_path / "s", HEX + "\n")) == bytes.fromhex(HEX)
    assert given_secret({}) is None


def test_the_variable_is_taken_out_of_the_environment_once_it_is_read(monkeypatch):
    monkeypatch.setattr("overlap.processes.secret._removed", {})
    monkeypatch.setenv("OVERLAP_SECRET", HEX)
    assert given_secret(os.environ) == bytes.fromhex(HEX)
    assert "OVERLAP_SECRET" not in os.environ
    assert given_secret(os.environ) == bytes.fromhex(HEX)  # the next world of this process needs it too
    monkeypatch.setenv("OVERLAP_SECRET", "another secret")
    assert given_secret(os.environ) == b"another secret"


@pytest.mark.parametrize("system", ["Linux", "another", "a container that forbids it"])
def test_what_is_handed_over_is_read_back_each_time_and_wins(system, monkeypatch):
    if system == "another":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif system != "Linux":
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    secret = generate()
    descriptor = hand_over(secret)
    try:
        environ = {"OVERLAP_SECRET_FD": str(descriptor), "OVERLAP_SECRET": HEX}
        assert len(secret) == 32
        assert given_secret(environ) == given_secret(environ) == secret
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    environ = private(tmp_path / "s", HEX, 0o640)
    assert error_of(environ) == f"{tmp_path / 's'}: others can read it (mode 0640); chmod go= {tmp_path / 's'}"


def test_what_is_no_secret_is_named_without_being_shown(tmp_path):
    assert error_of({"OVERLAP_SECRET_FILE": str(tmp_path / "x")}).endswith(
        "x: there is no such file; write a secret into it"
    )
    assert "no plain file or folder" in error_of({"OVERLAP_SECRET_FILE": str(tmp_path)})
    assert error_of(private(tmp_path / "s", "")).startswith("OVERLAP_SECRET_FILE: a secret of 0 bytes can be guessed")
    short = error_of({"OVERLAP_SECRET": "hunter2"})
    assert short.startswith("OVERLAP_SECRET: a secret of 7 bytes can be guessed; give every process the same ")
    assert "hunter2" not in short
    assert "expected a descriptor from `overlap run`, got 'x'" in error_of({"OVERLAP_SECRET_FD": "x"})


def test_processes_of_one_user_share_a_secret_that_nobody_else_can_read(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    found = []
    run_threads(threading.Thread(target=lambda: found.append(user_secret(environ))) for _ in range(8))
    assert found == [user_secret(environ)] * 8
    assert len(found[0]) == 32
    [folder] = tmp_path.iterdir()
    [file] = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]


def test_a_folder_that_others_can_enter_is_not_trusted(tmp_path):
    folder = tmp_path / f"overlap-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match=r"others can read it \(mode 0755\)"):
        user_secret({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_instead_of_the_folder_is_not_trusted(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / f"overlap-{os.getuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="no plain file or folder"):
        user_secret({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_secret_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "s"
    assert error_of({"OVERLAP_SECRET_FILE": str(inside)}) == f"{inside}: Not a directory; {ADVICE}"
    (tmp_path / "loop").symlink_to("loop")
    assert error_of({"OVERLAP_SECRET_FILE": str(tmp_path / "loop")}).startswith(f"{tmp_path / 'loop'}: Too many levels")
    assert (
        error_of({"OVERLAP_SECRET_FILE": "/none"})
        == "OVERLAP_SECRET_FILE: /none: there is no such file; write a secret into it"
    )
