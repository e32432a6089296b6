"""The README's programs, as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

import overlap
from tests.interpreters import Python, free_port

README = Path(__file__).parents[2] / "README.md"


def test_the_first_program_sends_gradients_while_it_computes_and_says_how_much_was_hidden() -> None:
    [program] = re.findall(r"## A training loop.*?```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": "train"}
    assert "range(20)" in program
    assert "step=10" in program
    exec(compile(program.replace("range(20)", "range(2)"), str(README), "exec"), names)
    recorders = overlap.run(names["train"], ranks=2, timeout_s=60)  # type: ignore[arg-type]
    for recorder in recorders:
        computed = [s for s in recorder.spans() if s.kind == "compute" and s.name == "backward" and s.step == 1]
        sent = [s for s in recorder.spans() if s.name.startswith("bucket") and s.step == 1]
        assert (len(computed), len(sent)) == (8, 8)
        assert min(s.info.issued_ns for s in sent if s.info) < max(s.end_ns for s in computed)
    timeline = overlap.timeline.Timeline.collect(recorders, world_size=2)
    assert "exposed" in str(overlap.why(timeline, step=1).verdict)


def test_the_program_that_connects_prints_what_is_said(tmp_path: Path) -> None:
    text = (README.parent / "docs" / "notebooks.md").read_text(encoding="utf-8")
    [program] = re.findall(r"<!-- file: meet\.py -->\n\n```python\n(.*?)```", text, re.DOTALL)
    [printed, again] = re.findall(r"^\['rank 0', .*$", text, re.MULTILINE)
    assert printed == again
    script = tmp_path / "meet.py"
    script.write_text(program.replace("29470", str(free_port())))
    ranks = [Python(script, me, cwd=tmp_path) for me in range(2)]
    assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == [printed] * 2


def test_on_two_processes_it_prints_one_verdict(tmp_path: Path) -> None:
    [program] = re.findall(r"## A training loop.*?```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    small = program.replace("(512, 512)", "(16, 16)").replace("(2, 512, 512)", "(2, 16, 16)")
    script = tmp_path / "train.py"
    script.write_text(small.replace("range(20)", "range(12)"))
    words = ["-m", "overlap", "run", "--processes", "2", "--ranks", "4", "--no-prefix", str(script)]
    run = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^step [\d.]+ \ws", run.stdout, re.MULTILINE)) == 1, run.stdout
