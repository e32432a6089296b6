"""Print the lowest version of each dependency that pyproject.toml allows, as constraints for pip."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"]:
    print(requirement.replace(">=", "=="))
