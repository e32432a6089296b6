"""Reports: the page, JSON, comparisons, conditions, and traces of our own."""

import json
import re
from pathlib import Path

import pytest

import overlap
from overlap.cli import main
from overlap.errors import UsageError
from overlap.explain.against import compare_reports
from overlap.explain.causes import NAMES
from overlap.explain.limits import parse_limit
from overlap.explain.page import page_lines
from overlap.explain.report import from_json
from overlap.timeline import write_trace
from tests.errors import error_of
from tests.explain.profiles import Recording
from tests.timeline.made import comm, compute, timeline_of


def profile(tmp_path, lengths, name="t.json", *, operator="aten::add"):
    """Record steps of these lengths; of each, 1 ms is computing and the host is late for the rest."""
    rec, start = Recording(), 1_000
    for number, length in enumerate(lengths):
        rec.step(number, start, start + length)
        rec.frame("train.py(12): step", start, start + length)
        for at in range(start, start + length, 100):
            rec.op(operator, at, at + 98)
            rec.kernel(at + 90, at + 100, launch=at + 85)
        start += length
    return rec.write(tmp_path / name)


def test_a_report_reads_back_from_its_json(tmp_path):
    found = overlap.why(profile(tmp_path, [10_000] * 3))
    assert from_json(json.dumps(found.as_dict())) == found


VERSION_1 = """{"schema": "overlap.why", "schema_version": 1, "verdict": "slow", "origin": "PyTorch profiler",
"ranks": [0], "world_size": 1, "step": 2, "step_ns": 7, "steps_ns": {"2": 7}, "causes":
[{"cause": "launch", "text": "late", "duration_ns": 7, "share": 1.0, "places": ["aten::add (7 ns)"]}],
"advice": [{"cause": "launch", "change": "compile",
"place": "", "evidence": "gaps", "gain_least_ns": 1, "gain_most_ns": 2, "gain_text": "1 to 2 ns"}], "undecided": [],
"notes": [], "traffic": [], "costs": [[0, 2, "launch", 7]], "hang": null}"""


def test_reports_of_the_first_version_are_read(tmp_path):
    path = tmp_path / "why.json"
    path.write_text(VERSION_1)
    found = overlap.why(path)
    assert (found.verdict, found.cost_ns("launch"), found.advice[0].gain_most_ns) == ("slow", 7, 2)
    assert found.per_step() == {2: 7}


def test_a_newer_version_and_other_json_are_refused():
    with pytest.raises(UsageError, match="newer version"):
        from_json(VERSION_1.replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.raises(UsageError, match="not a report"):
        from_json("{}")
    with pytest.raises(UsageError, match="damaged report"):
        from_json(VERSION_1.replace('"ranks": [0]', '"ranks": 0'))


def test_the_page_of_a_profile(tmp_path):
    found = overlap.why(profile(tmp_path, [10_000] * 3))
    assert page_lines(found, 100) == [
        "step 10.0 ms: compute 1.0; 9.0 (90%) the host launches too slowly (aten::add at train.py:12 (def",
        'step)); try: torch.compile(model, mode="reduce-overhead") or torch.cuda.graph; or a larger batch, -9',
        "ms if the rest stays, at most -9 ms",
        "",
        "      9.0 ms  90%  the host launches too slowly: aten::add at train.py:12 (def step) (9 ms)",
        "      1.0 ms  10%  computing: aten::add at train.py:12 (def step) (1 ms)",
        "",
        '1. torch.compile(model, mode="reduce-overhead") or torch.cuda.graph; or a larger batch (aten::add at',
        "   train.py:12 (def step) (9 ms))",
        "   100 kernels of 10 us (median); the queue of the device is empty; gain 9 ms to 9 ms a step (over 3",
        "   steps) if the rest stays, at most 9 ms",
        "step 1 is shown; 3 are recorded",
    ]
    assert str(found) in found._repr_html_().replace("&quot;", '"')


@pytest.mark.parametrize("columns", [50, 100, 160])
def test_a_page_obeys_columns_and_cuts_nothing_off(tmp_path, monkeypatch, columns):
    """Neither a place nor an advice nor an open question."""
    monkeypatch.setenv("COLUMNS", str(columns))
    found = overlap.why(profile(tmp_path, [10_000] * 3, operator="aten::" + "long_name " * 40))
    crowded = from_json(json.dumps({
        **found.as_dict(), "advice": [found.as_dict()["advice"][0]] * 5, "undecided": ["this " * 60] * 30,
        "notes": ["that " * 60] * 9,
    }))  # fmt: skip
    lines = str(crowded).splitlines()
    assert max(map(len, lines)) <= columns
    assert max(map(len, lines)) > columns - 20
    text = " ".join(" ".join(lines).split())
    for part in (found.verdict, found.causes[0].places[0], found.advice[0].change, found.advice[0].evidence):
        assert part in text
    assert text.count("cannot be told: this this") == 30
    assert text.count("that") == 9 * 60


@pytest.mark.parametrize(
    ("new", "old", "judgement"),
    [
        ([12_000, 12_100, 12_200], [10_000, 10_100, 10_200], "regression"),
        ([10_000, 10_100, 10_200], [12_000, 12_100, 12_200], "improvement"),
        ([10_000, 12_100, 11_000], [10_000, 10_100, 11_500], "noise"),
        ([12_000], [10_000, 10_100, 10_200], "undecided"),
    ],
)
def test_a_difference_counts_if_no_steps_overlap(tmp_path, new, old, judgement):
    new, old = profile(tmp_path, new, "new.json"), profile(tmp_path, old, "old.json")
    assert compare_reports(overlap.why(new), overlap.why(old)).judgement == judgement


def test_a_regression_names_the_cause_that_grew(tmp_path):
    new, old = profile(tmp_path, [12_000] * 3, "new.json"), profile(tmp_path, [10_000] * 3, "old.json")
    assert compare_reports(overlap.why(new), overlap.why(old)).sentence == (
        "regression: a step takes 10 ms before, 12 ms now (+20.0%), of which 1.8 ms more is the host launches too "
        "slowly at aten::add at train.py:12 (def step) (10.8 ms); 3 and 3 steps, none overlap"
    )


def test_a_comparison_keeps_to_a_narrow_page(tmp_path, capsys, monkeypatch):
    new, old = profile(tmp_path, [12_000] * 3, "new.json"), profile(tmp_path, [10_000] * 3, "old.json")
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["why", str(new), "--compare", str(old)]) == 0
    heading, _, _ = capsys.readouterr().out.partition("\n\n")
    assert max(map(len, heading.splitlines())) <= 40
    assert " ".join(heading.splitlines()) == compare_reports(overlap.why(new), overlap.why(old)).sentence


def test_conditions_decide_the_exit_code(tmp_path, capsys):
    new, old = profile(tmp_path, [12_000] * 3, "new.json"), profile(tmp_path, [10_000] * 3, "old.json")
    assert main(["why", str(new), "--compare", str(old), "--fail-if", "regression"]) == 1
    assert main(["why", str(old), "--compare", str(new), "--fail-if", "regression"]) == 0
    assert main(["why", str(new), "--fail-if", "launch > 80%", "--fail-if", "step > 1s"]) == 1
    assert "--fail-if: launch is 90%, above 80%" in capsys.readouterr().err
    assert main(["why", str(new), "--fail-if", "launch > 20ms"]) == 0
    assert main(["why", str(new), "--fail-if", "regression"]) == 2
    assert main(["why", str(new), "--fail-if", "step > 5%"]) == 2


def test_the_command_prints_json_that_it_reads(tmp_path, capsys):
    path = profile(tmp_path, [10_000] * 3)
    assert main(["why", str(path), "--json"]) == 0
    saved = tmp_path / "why.txt"
    saved.write_text(capsys.readouterr().out)
    assert overlap.why(saved) == overlap.why(path)


def test_a_table_needs_pandas_only_when_it_is_asked_for(tmp_path, monkeypatch):
    found = overlap.why(profile(tmp_path, [10_000] * 3))
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        found.to_pandas()
    assert found.costs[0] == (0, 0, "launch", 9_000_000)


def test_traces_of_our_own_have_the_same_form(tmp_path):
    timeline = timeline_of(
        compute(0, 0, 100), comm(0, 100, 150, 200), compute(1, 0, 150), comm(1, 150, 150, 200), compute(2, 0, 150),
        comm(2, 150, 150, 200),
    )  # fmt: skip
    write_trace(timeline, tmp_path / "t.json")
    found = overlap.why(tmp_path / "t.json")
    assert {cause.cause: cause.duration_ns for cause in found.causes} == {"compute": 133, "wire": 50, "waiting": 16}
    assert found.costs == (
        (0, None, "compute", 100), (0, None, "waiting", 50), (0, None, "wire", 50), (1, None, "compute", 150),
        (1, None, "wire", 50), (2, None, "compute", 150), (2, None, "wire", 50),
    )  # fmt: skip


def test_files_of_several_kinds_are_refused(tmp_path):
    profile(tmp_path, [10_000])
    write_trace(timeline_of(compute(0, 0, 100)), tmp_path / "u.json")
    with pytest.raises(UsageError, match="one kind"):
        overlap.why(tmp_path)


def test_dumps_of_flight_recorders_are_judged_as_hangs(tmp_path, capsys):
    def entry(number):
        return {
            "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
            "p2p_seq_id": 0, "op_id": number, "profiling_name": "gloo:all_reduce", "input_sizes": [[4]],
            "output_sizes": [[4]], "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "scheduled",
            "is_p2p": False, "retired": number == 1, "frames": [{"name": "f", "filename": "train.py", "line": number}],
        }  # fmt: skip

    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for rank, count in enumerate((2, 1)):
        entries = [entry(number) for number in range(1, count + 1)]
        dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(dump))
    found = overlap.why(tmp_path)
    assert found.hang.ranks == (1,)
    assert found.verdict.startswith("rank 1 ")
    data = json.loads(json.dumps(found.as_dict()))
    assert json.loads(json.dumps(from_json(json.dumps(data)).as_dict())) == data
    assert main(["why", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert page.startswith(found.verdict[:40])
    assert "train.py:2" in page


def test_a_verdict_on_a_part_of_a_file_says_so(tmp_path):
    path = profile(tmp_path, [10_000] * 3)
    path.write_bytes(path.read_bytes()[:-40_000])
    assert " ms of a file that was cut off: compute " in overlap.why(path).verdict


def test_what_another_tool_has_not_recorded_is_not_idle(tmp_path):
    hardware = {"name": "nc_exec_running", "duration": 5_000, "nc_idx": 0}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"trace_events": [hardware | {"timestamp": at} for at in (10_000, 20_000)]}))
    found = overlap.why(path)
    assert {cause.text: cause.duration_ns for cause in found.causes} == {
        "computing": 10_000, "nothing is recorded": 5_000,
    }  # fmt: skip
    assert "; 5.0 (33%) nothing is recorded" in found.verdict


def test_the_page_of_the_documentation_has_each_cause():
    page = (Path(__file__).parents[2] / "docs/how-to/why.md").read_text(encoding="utf-8")
    table = page[page.index("| cause | meaning |") : page.index("Without a device")]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == set(NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed > 5%", "--fail-if: 'speed > 5%' is no condition; write one of step, wire, then < or >, then a number "
                       "with %, ns, us, ms or s: 'wire > 5%'"),
        ("step > 5%", "--fail-if: 'step > 5%': step is a time; write one, such as 'step > 40ms'"),
    ],
)  # fmt: skip
def test_conditions_that_are_none(text, message):
    assert str(error_of(UsageError, parse_limit, text, ("step", "wire"))) == message


@pytest.mark.parametrize(
    ("text", "value", "described"),
    [
        ("wire > 5%", 53.2, "wire is 53.2%, above 5%"),
        ("wire>60%", 53.2, ""),
        ("waiting < 9us", 8_000, "waiting is 8 us, below 9 us"),
        ("waiting < 9us", 9_000, ""),
        ("step > 30 us", 31_000, "step is 31 us, above 30 us"),
    ],
)
def test_conditions(text, value, described):
    assert parse_limit(text, ("step", *NAMES)).failure_text(value) == described
