"""Child processes of benchmarks: their environment, their output as JSON, and their end with the benchmark."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from overlap.errors import OverlapError
from overlap.launch.lifeline import tie_to_pipe
from overlap.processes.place import without_launcher_variables

_ROOT = str(Path(__file__).parents[2])


class Child(subprocess.Popen[bytes]):
    """A process with a pipe for its output; it leads a session, and is killed when this process ends in any way.

    Ctrl-C reaches this process alone, which calls `end`.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        errors: File for its stderr; None: our stderr.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, errors: IO[bytes] | None = None) -> None:
        lifeline, self._held = os.pipe()
        try:
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
                pass_fds=[lifeline],
                start_new_session=True,
            )
            tie_to_pipe(lifeline, self.pid)
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(lifeline)

    def end(self) -> None:
        """Kill the session of the process; the processes of `overlap run` and of mpiexec end with it."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
        os.close(self._held)
        if self.stdout is not None:
            self.stdout.close()


def environment(*, bytecode: str | None = None) -> dict[str, str]:
    """Return this process's environment, changed so that a child imports this `overlap`.

    With PYTHONSAFEPATH a file of the current directory cannot stand in for a module of the standard library.

    Args:
        bytecode: A folder for compiled modules, so that all processes but the first find them compiled.
    """
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if bytecode is not None:
        changed.pop("PYTHONDONTWRITEBYTECODE", None)
        changed["PYTHONPYCACHEPREFIX"] = bytecode
    return changed


def start(
    options: Sequence[str],
    program: Sequence[str],
    *,
    before: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Child:
    """Start `overlap run OPTIONS -m PROGRAM`, which reports its failures on stderr.

    Settings of this process's own environment do not reach the program.

    Args:
        options: Options of `overlap run`.
        program: The module and its arguments.
        before: A command that runs this one.
        variables: Further environment variables.
    """
    command = [*before, sys.executable, "-m", "overlap", "run", *options, "--no-prefix", "-m", *program]
    plain = {name: value for name, value in environment().items() if not name.startswith("OVERLAP_")}
    environ = without_launcher_variables(plain) | dict(variables or {})
    return Child(command, environ)


def read_json_lines(processes: Sequence[Child]) -> Iterator[dict[str, Any]]:
    """Yield each line of JSON as soon as the first process prints it, and wait for the end of all.

    Raises:
        OverlapError: If a process fails, after the last line.
    """
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            yield json.loads(line)
        for code in [process.wait() for process in processes]:
            if code:
                raise OverlapError(f"a process that was to be measured ended with exit code {code}; see above")
    finally:
        for process in processes:
            process.end()
