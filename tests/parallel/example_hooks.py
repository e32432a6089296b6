"""The hooks of `examples/hooks`, which are scripts in no package."""

from pathlib import Path
from runpy import run_path

_FOLDER = Path(__file__).parents[2] / "examples" / "hooks"

float8, power_sgd, top_k = (run_path(str(_FOLDER / f"{name}.py"))[name] for name in ("float8", "power_sgd", "top_k"))
