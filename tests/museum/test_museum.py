"""Historic bugs from public threads, rebuilt: each is found, with its ranks and line; right programs are well."""

import re
from pathlib import Path

import pytest

from overlap.testing import Ranks, RanksFailed

pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).parent
# By program: the kind of verdict, and the ranks at fault, of four.
BUGS = {
    "both_send": ("cycle", {0, 1}),
    "group_of_some": ("group of some", {2, 3}),
    "handle_ignored": ("buffer in flight", {0}),
    "order_of_a_set": ("mismatch", None),  # which ranks differ is the seed's choice
    "other_seeds": ("weights differ", {1, 2, 3}),
    "pipeline_sends": ("cycle", {0, 1, 2, 3}),
    "saved_by_one": ("skipped", {1}),
    "seen_by_some": ("mismatch", {2}),
    "shapes_differ": ("mismatch", {1}),
    "sizes_differ": ("mismatch", {0, 1}),
    "stopped_early": ("left", {0}),
    "survived_order": ("cycle", {1}),
    "tags": ("tags", {0, 1}),
    "two_groups": ("cycle", {1}),  # of the three ranks that it is made smaller to
    "uneven_inputs": ("left", {1}),
    "unused_by_one": ("gradient missing", {1}),
}


def wrong_lines(program: str) -> set[str]:
    lines = (HERE / f"{program}.py").read_text().splitlines()
    return {f"{program}.py:{number}" for number, line in enumerate(lines, 1) if "# wrong" in line}


def test_every_program_is_here_has_a_link_and_is_short() -> None:
    found = {path.stem: path.read_text() for path in HERE.glob("*.py") if not path.stem.startswith(("test_", "__"))}
    assert set(found) == set(BUGS)
    assert [
        name for name, text in found.items() if not re.search(r"https://github.com/\S+/(issues|pull)/\d+", text)
    ] == []
    assert [name for name, text in found.items() if len(text.splitlines()) > 30] == []


@pytest.mark.parametrize("program", BUGS)
def test_the_bug_is_found_with_the_right_ranks_and_line(program: str) -> None:
    kind, ranks = BUGS[program]
    with pytest.raises(RanksFailed) as caught:
        Ranks(HERE).program(f"{program}.py", ranks=4, seeds=200)
    verdict = caught.value.verdict
    assert verdict.kind == kind
    assert wrong_lines(program) & set(verdict.lines)
    assert ranks is None or ranks & set(verdict.ranks)
    assert f'repeat: ranks.program("{program}.py", ranks=' in str(caught.value)


def test_the_same_question_names_the_ranks_whose_weights_differ() -> None:
    same = Ranks(HERE).program("other_seeds.py", ranks=4, check=False).same("model weights")
    assert not same
    assert same.problem.startswith("weights differ: before the first update 'weight' differs: ranks 1-3 (")
    assert "random numbers of rank 1 are no longer those of rank 0" in same.problem


@pytest.mark.parametrize("program", BUGS)
def test_the_right_program_is_well(program: str) -> None:
    run = Ranks(HERE).program(f"{program}.py", ["--right"], ranks=4, seeds=2)
    assert not run.verdicts
    assert not any(run.weights) or run.same()


@pytest.mark.slow
@pytest.mark.parametrize("program", BUGS)
def test_a_thousand_runs_of_right_programs_give_no_false_alarm(program: str) -> None:
    """63 seeds of 16 programs."""
    run = Ranks(HERE).program(f"{program}.py", ["--right"], ranks=4, seed=2, seeds=63)  # raises at the first that fails
    assert not run.verdicts
