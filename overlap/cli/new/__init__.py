"""`overlap new NAME`: makes a folder with a training loop, a test of it, a README and a workflow file."""

# templates/: the files of each kind of project;  common/ has those of all

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from ...errors import UsageError
from ...settings import Option
from ...units import parse_yes_no
from ..options import add_options

DESCRIPTION = """\
Make a folder NAME with a program that trains, a test with many ranks in one process, a README, and a workflow file
that runs the test. Everything in it runs at once, and is there to be changed.
"""

EPILOG = """\
examples:
  overlap new first           a program of overlap.parallel and numpy
  overlap new first --torch   one of PyTorch's DistributedDataParallel
"""

_OPTIONS = {"torch": Option(read=parse_yes_no, help="a PyTorch program")}

_WORKFLOW = ".github/workflows/tests.yml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("name", metavar="NAME", help="folder to make; its last part is the name of the project")
    add_options(parser, _OPTIONS)


def main(args: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UsageError: If the folder exists, or cannot be made; nothing is left then.
    """
    folder = Path(args.name)
    if not folder.name or not folder.name.isprintable():
        raise UsageError(f"NAME: expected the name of a folder, got {args.name!r}")
    if os.path.lexists(folder):
        raise UsageError(f"NAME: {folder} exists already; choose another name")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            made = Path(scratch, folder.name)
            for path, text in _project_files("torch" if args.torch else "numpy", folder.name):
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, encoding="utf-8")
            made.rename(folder)  # all of it at once
    except OSError as error:
        raise UsageError(f"NAME: {folder} cannot be made: {error.strerror}; choose another place") from None
    print(f"{folder}: {', '.join(sorted(str(path) for path, _ in _project_files('numpy', folder.name)))}")
    print(f"next: cd {folder}; " + ("torchrun --nproc-per-node 2 train.py" if args.torch else "python train.py"))
    return 0


def _project_files(kind: str, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the paths and the texts of a project's files; `kind` is "numpy" or "torch"."""
    templates = files(__name__) / "templates"
    source = f"{__name__.partition('.')[0]}{'[torch]' * (kind == 'torch')} "
    common = templates / "common"
    workflow = (common / "workflow.yml.template").read_text(encoding="utf-8")
    yield Path(_WORKFLOW), workflow.replace("{{source}}", source)
    yield Path("pytest.ini"), (common / "pytest.ini.template").read_text(encoding="utf-8")
    for file in (templates / kind).iterdir():
        yield Path(file.name.removesuffix(".template")), file.read_text(encoding="utf-8").replace("{{name}}", name)
