"""`overlap calibrate --published`, of collectives and of steps: what they print and return."""

import json
from dataclasses import replace

import pytest

from overlap.cli.calibrate import published as command
from overlap.cli.calibrate import steps
from overlap.cost import validation
from overlap.planning.validation import StepComparison, published_steps


def test_the_whole_page_of_a_machine(overlap):
    code, out, err = overlap("calibrate", "--published", "--machine", "inf2.xlarge")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
all_reduce of uint8 on 2 ranks of inf2.xlarge (nccom-test on inf2.xlarge, uint8)
     size  measured  predicted   error
    1 MiB   23.5 us    27.3 us  +16.2%  predicted
  2.4 MiB   50.5 us    54.1 us   +7.1%  predicted
  3.8 MiB   77.8 us    80.8 us   +3.8%  predicted
  5.2 MiB    105 us     108 us   +2.4%  predicted
    8 MiB    160 us     161 us   +0.7%  fits bytes reduced per second

all_reduce of uint8 on 2 ranks of inf2.xlarge (floor of two ranks on one chip)
  size  measured  predicted  error
   0 B      4 us     4.1 us  +2.5%  fits semaphores of a step

the planner, by class of rows
  class                  dtype  not fitted to  median  worst  all rows  median  worst  asked
  Inferentia2, one node  uint8              4    5.4%  16.2%         6    3.1%  16.2%  8%, 20%: met
  all                                       4    5.4%  16.2%         6    3.1%  16.2%

taken as published, not predicted: start of a DMA 1.3 us, NeuronLink hop 1.5 us
  (of 1 to 2 us), EFA hop 15 us
"""
    )


@pytest.mark.slow
def test_peer_direct_is_one_table_of_two_settings(overlap):
    code, out, _ = overlap("calibrate", "--published", "--machine", "dl1.24xlarge")
    assert code == 0
    lines = out.splitlines()
    at = lines.index("Peer Direct on dl1.24xlarge x4, one model with two settings, in nw_bw MB/s")
    figures = [[int(word.replace(",", "")) for word in line.split()[1:]] for line in lines[at + 2 : at + 4]]
    assert [row[::2] for row in figures] == [[12110, 21136], [9249, 17418]]
    assert lines[at + 4].startswith("  training throughput with Peer Direct over without: 1.72 measured, ")


def test_crossovers_on_the_page_and_as_json(overlap, monkeypatch):
    """`tests/cost/test_validation` searches for them, which takes seconds."""
    monkeypatch.setattr(
        validation, "_predict_crossover", lambda knee: validation.Crossover(knee=knee, predicted_bytes=knee.most_bytes)
    )
    code, out, _ = overlap("calibrate", "--published", "--machine", "trn2.48xlarge")
    assert code == 0
    assert "where one algorithm takes over from another\n  mesh to rdh on 64 ranks of trn2.48xlarge" in out
    assert "8 of 8 crossovers where they were seen\n" in out
    assert "OUTSIDE" not in out
    code, out, _ = overlap("calibrate", "--published", "--machine", "trn2.48xlarge", "--json")
    found = json.loads(out)
    assert (code, found["schema_version"]) == (0, command.SCHEMA_VERSION)
    assert len(found["rows"]) == 22
    fitted, *_ = (row for row in found["rows"] if row["fits"] == "wire efficiency")
    assert (fitted["measured"], fitted["figure"], fitted["used_for"]) == (221.62e-6, 221.62, "calibration")
    assert fitted["error"] == fitted["predicted"] / fitted["measured"] - 1
    assert {row["used_for"] for row in found["rows"] if not row["fits"]} == {"prediction"}
    assert [(each["name"], each["dtype"], each["unseen"]["rows"]) for each in found["classes"]] == [
        ("Trainium2, one node", "float32", 11),
        ("Trainium2, one node", "bfloat16", 8),
    ]
    assert [each["inside"] for each in found["crossovers"]] == [True] * 8


@pytest.mark.slow
def test_a_crossover_that_is_elsewhere_is_told(overlap, monkeypatch):
    elsewhere = [None, 1]
    monkeypatch.setattr(
        validation, "_predict_crossover",
        lambda knee: validation.Crossover(knee=knee, predicted_bytes=elsewhere.pop() if elsewhere else knee.most_bytes),
    )  # fmt: skip
    out = overlap("calibrate", "--published", "--machine", "trn2.48xlarge")[1]
    assert out.count(" (OUTSIDE)") == 1
    assert "6 of 8 crossovers where they were seen\n" in out


def test_check_tells_by_the_exit_code(overlap, monkeypatch):
    words = ("calibrate", "--published", "--machine", "inf2.xlarge")
    assert overlap(*words, "--enforce")[0] == 0
    monkeypatch.setattr(validation, "_NEURON", validation.AccuracyGoal(median=0.08, worst=0.1))
    assert overlap(*words)[0] == 0
    code, out, _ = overlap(*words, "--enforce")
    assert code == 1
    assert (
        "Inferentia2, one node  uint8              4    5.4%  16.2%         6    3.1%  16.2%  8%, 10%: MISSED\n" in out
    )


def test_a_machine_to_which_every_row_was_fitted(overlap):
    out = overlap("calibrate", "--published", "--machine", "dl1.24xlarge x4")[1]
    assert (
        "\n  Gaudi, across nodes  float32              0                        4    0.0%   0.1%  all fitted\n" in out
    )


@pytest.mark.slow
def test_all_collectives_are_predicted_whatever_folder_one_is_in(overlap, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = overlap("calibrate", "--published", "collectives")
    assert (code, err) == (0, "")
    words = [line.split() for line in out.splitlines()]
    assert ["H100,", "across", "nodes", "float32"] in [line[:4] for line in words]  # machines of files of ours, too
    assert ["Trainium2,", "one", "node", "float32"] in [line[:4] for line in words]


@pytest.fixture
def one_step(monkeypatch):
    """The steps that are published, of which one is judged without being predicted."""
    row = replace(next(row for row in published_steps() if row.id == "mb-405b-b200"), noted="")
    judged = StepComparison(
        published=row, predicted_s=1.1 * row.measured_s, compute=0.5, fits=True, left_out_s=0.8 * row.measured_s
    )
    monkeypatch.setattr(steps, "compare_steps", lambda rows: [judged])
    return judged


def test_steps_and_their_classes(overlap, one_step):
    code, out, err = overlap("calibrate", "--published", "steps")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
published step  class     measured  predicted   error  left out  fits
mb-405b-b200    B200 fp8     6.2 s     6.82 s  +10.0%    -20.0%   yes


class     rows  median  worst  left out: median  worst
B200 fp8     1   10.0%  10.0%             20.0%  20.0%
all          1   10.0%  10.0%             20.0%  20.0%

left out: each step predicted with the share `sustained` fitted to all others.
"""
    )
    found = json.loads(overlap("calibrate", "--published", "steps", "--json")[1])
    assert [(row["id"], row["fits"], row["class"]) for row in found["steps"]] == [("mb-405b-b200", True, "B200 fp8")]
    assert found["steps"][0]["error"] == one_step.error


def test_the_former_command_names_its_successor(overlap):
    code, _, err = overlap("validate", "steps", "--machine", "trn9")
    assert code == 2
    assert err.startswith("overlap: `overlap validate` is now `overlap calibrate --published`")
    assert "no step is published of 'trn9'" in err
