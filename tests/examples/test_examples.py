"""Every example does what it says at its top; workloads on modelled clusters are exact, to the letter."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import interpreters

# -- every example does what it says at its top, on its own and under `overlap run` ------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"

HELLO = """\
hello from rank 0 of 4: the squares up to 0 add up to 0
hello from rank 1 of 4: the squares up to 1 add up to 1
hello from rank 2 of 4: the squares up to 2 add up to 5
hello from rank 3 of 4: the squares up to 3 add up to 14
"""

COLLECTIVE = """\
rank 0 gave [1, 10], sum [6, 60], gathered [1, 10, 2, 20, 3, 30]
rank 1 gave [2, 20], sum [6, 60], gathered [1, 10, 2, 20, 3, 30]
rank 2 gave [3, 30], sum [6, 60], gathered [1, 10, 2, 20, 3, 30]
"""

BY_HAND = """\
rank 0
  last layer reduced to [1.5, 1.5, 1.5, 1.5]
  meanwhile: first layer pending, its all-reduce pending
  first layer done, reduced to [15.0, 15.0]
rank 1
  last layer reduced to [1.5, 1.5, 1.5, 1.5]
  meanwhile: first layer pending, its all-reduce pending
  first layer done, reduced to [15.0, 15.0]
"""

MANY = """\
rank 0 of 4 is rank 0 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 0, 0]
rank 1 of 4 is rank 1 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 0, 0]
rank 2 of 4 is rank 2 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 0, 0]
rank 3 of 4 is rank 3 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 0, 0]
"""

ON_TWO_NODES = """\
rank 0 of 4 is rank 0 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 1, 1]
rank 1 of 4 is rank 1 of node 0: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 1, 1]
rank 2 of 4 is rank 0 of node 1: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 1, 1]
rank 3 of 4 is rank 1 of node 1: mean gradient [2.5, 2.5, 2.5], from nodes [0, 0, 1, 1]
"""

# The last digits depend on the processor, through the order in which its BLAS adds.
DIGITS = re.compile(
    r"step 20: loss 0\.[67]\d\d\n"
    r"step 40: loss 0\.3\d\d\n"
    r"step 60: loss 0\.2\d\d\n"
    r"step 80: loss 0\.[12]\d\d\n"
    r"step 100: loss 0\.1\d\d\n"
    r"accuracy (9[6-9]\.\d)% of 359 test images\n"
)


def printed_by(*argv):
    done = interpreters.run(*argv, cwd=EXAMPLES.parent, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("01_hello_ranks", HELLO),
        ("02_collective", COLLECTIVE),
        ("03_overlap_by_hand", BY_HAND),
        ("05_many_processes", MANY),
    ],
)
def test_printed_exactly(name, expected):
    assert printed_by(EXAMPLES / f"{name}.py") == expected


def test_expert_parallel():
    first, *rows = printed_by(EXAMPLES / "26_expert_parallel.py").splitlines()
    told = re.fullmatch(r"loss (0\.\d{3}) at first, (0\.\d{3}) after 60 steps", first)
    assert float(told[2]) < float(told[1]) / 5
    assert sum(int(re.fullmatch(r"rank \d: (\d+) tokens for its 2 experts", row)[1]) for row in rows) == 4 * 64


def test_local_steps():
    said = r"loss (0\.\d{3}) at first, (0\.\d{5}) after 100 steps; weights are equal\n"
    told = re.fullmatch(said, printed_by(EXAMPLES / "27_local_steps.py"))
    assert float(told[2]) < float(told[1]) / 100


def test_one_rank_has_no_share_of_hidden_communication():
    shown = printed_by("-m", "overlap", "run", "--ranks", "1", EXAMPLES / "12_zero.py", "1")
    assert shown.count("overlap: nothing was communicated\n") == 2


def test_digits_are_learnt():
    assert DIGITS.fullmatch(printed_by(EXAMPLES / "04_digits.py"))


@pytest.mark.slow
def test_the_command_line_decides_how_many_ranks():
    shown = printed_by("-m", "overlap", "run", "--ranks", "2", EXAMPLES / "01_hello_ranks.py")
    assert shown == "".join(HELLO.replace("of 4", "of 2").splitlines(keepends=True)[:2])


@pytest.mark.slow
def test_digits_do_not_depend_on_the_number_of_ranks():
    assert DIGITS.fullmatch(printed_by("-m", "overlap", "run", "--ranks", "3", EXAMPLES / "04_digits.py"))


@pytest.mark.slow
def test_the_same_program_in_two_processes():
    shown = printed_by(
        "-m", "overlap", "run", "--processes", "2", "--cluster", "local x2", EXAMPLES / "05_many_processes.py"
    )
    nodes = [line[: len("[process 0]")] for line in sorted(shown.splitlines())]
    assert nodes == ["[process 0]", "[process 0]", "[process 1]", "[process 1]"]
    assert sorted_lines(re.sub(r"^\[process \d\] ", "", shown, flags=re.M)) == ON_TWO_NODES


@pytest.mark.slow
def test_two_hosts():
    """Needs the rights to make network namespaces."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} of iproute2 is not installed")
    name = f"overlap-test-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=60)
    if made.returncode:
        pytest.skip(f"no rights to make a network namespace: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", name], check=True, timeout=60)
    done = subprocess.run(
        ["sh", EXAMPLES / "06_two_hosts.sh"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, sorted_lines(done.stdout)) == (0, ON_TWO_NODES)
    assert re.fullmatch(r"overlap: node 1 waits .*\noverlap: node 1 has joined\n", done.stderr)


def sorted_lines(text):
    return "".join(sorted(text.splitlines(keepends=True)))


def lines_of(path):
    """Return the lines that a reader sees: of a notebook, those of its cells."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text.splitlines()
    return [line for cell in json.loads(text)["cells"] for line in cell["source"]]


PROGRAMS = ("26_expert_parallel", "27_local_steps")
"""Examples in place of strategies, which are whole programs."""


def test_every_example_is_tested_short_and_numbered_in_a_row():
    found = sorted(path for path in EXAMPLES.iterdir() if path.is_file())
    assert [path.name[:3] for path in found] == [f"{number:02}_" for number in range(1, len(found) + 1)]
    folders = (Path(__file__).parent, Path(__file__).parents[1] / "survival")
    tests = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert [path.name for path in found if path.stem not in tests] == []
    assert all(len(lines_of(path)) < (90 if path.stem in PROGRAMS else 60) for path in found)
    assert all("You will see" in path.read_text() for path in found)


# -- workloads on modelled clusters: their simulated times are exact, so what they print is compared to the letter -----


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
def test_workloads_are_printed_exactly(name):
    assert printed_by(f"examples/{name}.py") == EXPECTED[name]


def test_the_page_on_training_tells_what_the_strategies_reach():
    told = (EXAMPLES.parent / "docs" / "training.md").read_text()
    rows = [re.split(" {2,}", line) for line in STRATEGIES.splitlines()[1:]]
    assert len(rows) == 6
    assert [name for name, *figures in rows if f"| {name} | {' | '.join(figures)} |" not in told] == []


@pytest.mark.slow
def test_smaller_buckets_of_a_small_transformer_hide_more():
    """The settings that the example suggests, on a smaller model."""

    def simulated(nodes, bucket):
        script = ("examples/07_transformer.py", "--layers", "3", "--bucket-bytes", bucket)
        done = interpreters.run(
            "-m", "overlap", "simulate", "--json", "--nodes", nodes, *script, cwd=EXAMPLES.parent, timeout=100
        )
        assert done.returncode == 0, done.stderr  # which has what the program itself prints
        return json.loads(done.stdout)["runs"][0]

    one, all_of_one, two, all_of_two = (
        simulated(nodes, bucket) for nodes in ("1", "2") for bucket in ("100MiB", "3GiB")
    )
    assert (one["world_size"], two["world_size"]) == (64, 128)
    assert one["exposed_ns"] < all_of_one["exposed_ns"] == all_of_one["comm_ns"]
    assert two["exposed_ns"] < all_of_two["exposed_ns"] == all_of_two["comm_ns"]
