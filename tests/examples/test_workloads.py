"""Workloads on modelled clusters: their simulated times are exact, so what they print is compared to the letter."""

import json
import re
from pathlib import Path

import pytest

from tests import interpreters

ROOT = Path(__file__).parents[2]

TRANSFORMER = """\
1,207,959,552 weights on 64 ranks: a step takes 1039.420900 ms,
246.29 samples per second
"""

BERT = """\
samples      compute in ms  host copies  Peer Direct  ratio   error
published                          391.44       674.73   1.72
4 x 24           25990.433770       391.44       422.37   1.08  -37.4%
1 x 8              835.096605       391.44       550.54   1.41  -18.4%
no compute at all                                        1.74
"""

TENSOR_PARALLEL = """\
instances  replicas  gradients at the end  gradients at once
        1         4         187.176016 ms      179.315672 ms
       16        64         215.266848 ms      181.469587 ms
"""

TWO_STREAMS = """\
streams  layers ahead  step (ms)
      1             0  58.383432
      2             0  58.224504
      1             1  31.516677
      2             1  31.158935
      1             2  32.284091
      2             2  30.849239
"""

STRATEGIES = """\
strategy       step (ms)  exposed (ms)  memory (GiB)
data parallel     72.080         1.893         8.000
ZeRO-1            51.416         1.922         4.062
ZeRO-2            51.416         1.922         2.094
ZeRO-3            51.416         1.922         0.125
tensor x data     55.717         1.080         2.000
1F1B x data       98.874        10.914         2.000
"""

NAIVE_AND_OVERLAPPED = """\
loop        step (ms)  exposed (ms)  of the ideal
naive         129.467        21.674         83.3%
overlapped    109.072         1.279         98.8%
"""


def printed_by(*argv):
    done = interpreters.run(*argv, cwd=ROOT, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


WITH_AND_WITHOUT = """\
strategy         without (ms)  with (ms)  times as fast
data_parallel          54.472     49.683           1.10
zero                   57.873     45.826           1.26
tensor_parallel       110.406     93.998           1.17
pipeline              112.478     78.119           1.44
"""

EXPECTED = {
    "07_transformer": TRANSFORMER,
    "08_bert_peer_direct": BERT,
    "09_tensor_parallel": TENSOR_PARALLEL,
    "10_two_streams": TWO_STREAMS,
    "18_strategies": STRATEGIES,
    "19_naive_and_overlapped": NAIVE_AND_OVERLAPPED,
    "21_with_and_without": WITH_AND_WITHOUT,
}


SHORT = ("10_two_streams",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(n, marks=pytest.mark.slow) for n in EXPECTED if n not in SHORT)]
)
def test_printed_exactly(name):
    assert printed_by(f"examples/{name}.py") == EXPECTED[name]


def test_the_page_on_training_tells_what_the_strategies_reach():
    told = (ROOT / "docs" / "training.md").read_text()
    rows = [re.split(" {2,}", line) for line in STRATEGIES.splitlines()[1:]]
    assert len(rows) == 6
    assert [name for name, *figures in rows if f"| {name} | {' | '.join(figures)} |" not in told] == []


@pytest.mark.slow
def test_smaller_buckets_of_a_small_transformer_hide_more():
    """The settings that the example suggests, on a smaller model."""

    def simulated(nodes, bucket):
        script = ("examples/07_transformer.py", "--layers", "3", "--bucket-bytes", bucket)
        done = interpreters.run("-m", "overlap", "simulate", "--json", "--nodes", nodes, *script, cwd=ROOT, timeout=100)
        assert done.returncode == 0, done.stderr  # which has what the program itself prints
        return json.loads(done.stdout)["runs"][0]

    one, all_of_one, two, all_of_two = (
        simulated(nodes, bucket) for nodes in ("1", "2") for bucket in ("100MiB", "3GiB")
    )
    assert (one["world_size"], two["world_size"]) == (64, 128)
    assert one["exposed_ns"] < all_of_one["exposed_ns"] == all_of_one["comm_ns"]
    assert two["exposed_ns"] < all_of_two["exposed_ns"] == all_of_two["comm_ns"]
