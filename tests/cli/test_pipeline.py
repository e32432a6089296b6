"""`overlap plan` of a schedule: what it prints and returns."""

import json

from overlap.parallel import schedules

PAGE = """\
zb-h1: 2 ranks, 2 stages, 3 microbatches

  time    10, of which a rank is idle for 1 (10%); by the formula 1
  memory  2 activations at once on a rank, each of a microbatch at a stage

time  0  1  2  3  4  5  6  7  8  9
   0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2
   1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2

schedule              time  idle  share  held at once (of a rank's whole part)
  gpipe                  12     3    25%  3
  1f1b                   12     3    25%  2
  interleaved-1f1b     10.5   1.5    14%  3
* zb-h1                  10     1    10%  2
  zb-h2                  10     1    10%  3
  zb-v                  9.5   0.5     5%  2
"""


def test_the_whole_page(overlap):
    assert overlap("plan", "zb-h1", "--ranks", "2", "--microbatches", "3") == (0, PAGE, "")


def test_a_text_form_is_read_back(overlap, tmp_path):
    (tmp_path / "own.csv").write_text(schedules.make("interleaved-1f1b", ranks=2, microbatches=2).text())
    _, out, _ = overlap("plan", "own.csv")
    assert out.startswith("own.csv: 2 ranks, 4 stages, 2 microbatches\n")
    assert "\n  interleaved-1f1b       15     3    20%  2\n" in out
    assert "\n* " not in out


def test_json(overlap):
    described = json.loads(overlap("plan", "1F1B", "--ranks", "2", "--microbatches", "2", "--json")[1])
    assert described == {
        "schema_version": 1,
        "name": "1f1b",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "rows": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "starts": [[0, 1, 4, 7], [1, 2, 4, 5]],
        "makespan": 9,
        "bubble": [3, 3],
        "bubble_by_formula": 3,
        "peak_live": [2, 1],
    }


def test_what_cannot_be_meant_is_told(overlap, tmp_path):
    (tmp_path / "bad.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    (tmp_path / "odd.csv").write_text("0F0,forward\n")
    told = {
        ("2f2b", "--microbatches", "4"): (
            2,
            "name: '2f2b' is no schedule; known are gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v",
        ),
        ("1f1b", "--ranks", "0"): (2, "ranks: expected a whole number from 1, got 0"),
        ("none.csv", "--microbatches", "1"): (
            2,
            "SUBJECT: none.csv cannot be read: [Errno 2] No such file or directory: 'none.csv'; "
            "name a text file with a schedule",
        ),
        ("odd.csv",): (2, "text: 'forward' is no action; one is a stage, F, B, I or W, and a microbatch, such as 2F0"),
        ("bad.csv",): (
            1,
            "schedule 'bad.csv': it never ends: rank 0 waits in 0B0 for 1B0 or 1I0, rank 1 waits in 1F1 "
            "for 0F1; reorder them\n"
            "  rank 0: 0F0 >>0B0<< 0F1 0B1\n"
            "  rank 1: 1F0 1F1 1B0 1B1",
        ),
    }
    for words, (code, line) in told.items():
        assert overlap("plan", *words) == (code, "", f"overlap: {line}\n")
