"""The README's first program, as it is printed."""

import re
from pathlib import Path

import numpy as np

import overlap

README = Path(__file__).parents[2] / "README.md"


def test_the_first_program_trains_all_ranks_alike() -> None:
    [program] = re.findall(r"## A training loop.*?```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": "train"}
    assert "range(20)" in program
    exec(compile(program.replace("range(20)", "range(2)"), str(README), "exec"), names)
    train = names["train"]
    sums = overlap.run(train, ranks=2, timeout_s=60)  # type: ignore[arg-type]
    first = 0.06 * np.random.default_rng((0, 0)).standard_normal((512, 512), np.float32)
    assert sums[0] == sums[1]
    assert sums[0] != float(first.sum())
