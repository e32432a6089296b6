"""The compiled mailbox, built with other flags: under sanitizers of gcc, and with pauses that open its races.

`python -m tests.transports.mailbox_builds` runs its tests under each sanitizer, and the fuzzer. A program that imports
this module with MAILBOX_BUILD in its environment uses the extension at that path: `pytest -p` does so.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

_NAME = "transports.shared_memory._native"
_FOLDER = Path(__file__).parent
_SOURCES = sorted((_FOLDER.parents[1] / "transports/shared_memory/native").glob("*.c"))
COMPILER = shutil.which("gcc")
DELAYS = ["-include", str(_FOLDER / "mailbox_delays.h")]

# Name, the library that a program must load first, its settings, and the commands that run under it. The fuzzer, and
# some tests, access shared memory without any order, as a faulty peer does; the one for threads would report that.
_SANITIZERS = [
    (
        "address,undefined",
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
        ["tests", "fuzzer"],
    ),
    ("thread", "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1"}, ["ordered tests"]),
]
_PYTEST = ["pytest", "-q", "-n", "0", "-p", "tests.transports.mailbox_builds", "-p", "no:cacheprovider"]
_NAMES = ["mailbox", "collectives_of_engines", "signed_rows"]
FILES = [f"tests/transports/test_{name}.py" for name in _NAMES]
_TESTS = [*_PYTEST, "-m", "slow or not slow", *FILES, "-k"]
_UNORDERED = ["nonsense", "head_that", "refuses_it", "look_at_a_message", "garbage", "fork"]
_UNORDERED += ["not_believed", "own_slice", "not_given_back", "ends_at_once", "works_on"]
_COMMANDS = {
    "tests": [*_TESTS, "not whenever_it_is_closed"],
    "ordered tests": [*_TESTS, f"not whenever_it_is_closed and not {' and not '.join(_UNORDERED)}"],
    "fuzzer": ["tests.transports.mailbox_fuzzer", "--seconds", "20"],
}
_LIMIT_S = 200.0  # of each


def build(folder: Path, flags: list[str]) -> Path:
    """Compile the mailbox into a folder, and return the extension."""
    built = folder / "_native.so"
    include = sysconfig.get_path("include")
    command = [COMPILER or "gcc", "-shared", "-fPIC", "-g", "-O1", "-pthread", "-I", include, *flags]
    subprocess.run([*command, *map(str, _SOURCES), "-o", str(built)], check=True)
    return built


def use(built: str) -> None:
    """Let this program import an extension that was built here."""
    spec = spec_from_loader(_NAME, ExtensionFileLoader(_NAME, built))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NAME] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _run_all(folder: Path) -> int:
    """Run everything under every sanitizer, print a line of each, and return how many failed."""
    failed = 0
    for name, library, settings, commands in _SANITIZERS:
        built = build(folder, [f"-fsanitize={name}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"])
        asked = [COMPILER or "gcc", f"-print-file-name={library}"]
        preload = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        environment = os.environ | settings | {"LD_PRELOAD": preload, "MAILBOX_BUILD": str(built)}
        for command in commands:
            try:
                ended = subprocess.run(
                    [sys.executable, "-m", *_COMMANDS[command]], env=environment, timeout=_LIMIT_S, check=False
                )
                outcome = f"exit status {ended.returncode}" if ended.returncode else "passed"
            except subprocess.TimeoutExpired:
                outcome = f"did not end within {_LIMIT_S:g} s"
            failed += outcome != "passed"
            print(f"{name:20} {command:13} {outcome}", flush=True)
    return failed


if "MAILBOX_BUILD" in os.environ:
    use(os.environ["MAILBOX_BUILD"])
if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(_run_all(Path(scratch)) != 0)
