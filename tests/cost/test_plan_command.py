"""`overlap plan`: what it prints and returns."""

import json

import pytest

from overlap.cli import plan as command
from overlap.cli.parser import Parser
from overlap.collectives.schedule import IN_RANK_ORDER
from overlap.errors import UsageError
from topology import TopologyError


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser("overlap plan")
    command.add_arguments(parser)

    def run(*words):
        code = command.main(parser.parse_args(words))
        return code, capsys.readouterr().out

    return run


def test_the_whole_page(run):
    code, out = run("all_gather", "--bytes", "1MiB", "--cluster", "trn2.48xlarge", "--top", "2")
    assert code == 0
    assert (
        out
        == """\
all_gather of 1 MiB float32 on 64 ranks (0-63) of trn2.48xlarge

  mesh
  predicted     30.2 us
  library       NeuronX carries it out
  why           6% faster than rdh (over 16 devices as a cube): 7.84 us less for
                starting steps, but 13.4 us more for bytes on wires
  time goes to  3.5 us launch, 7.14 us starting steps, 1.5 us latency, 18 us
                bytes on wires, 61.1 ns copies in memory
  steps         1
  bytes         1008 KiB sent by the busiest rank
  hops          1 neuronlink, on the longest way of every step
  busiest link  neuronlink device 0.0 -> device 0.1, 18 us of bytes

alternatives:
     32 us      +6%  rdh (over 16 devices as a cube)
   62.9 us    +108%  recursive_doubling
  and 4 slower ones (--top 6)
  swing does not apply: it needs one rank on each device of a torus, in order
  bucket does not apply: it needs one rank on each device of a torus, in order
  hierarchical does not apply: all ranks are on one node
  direct does not apply: it is for ranks of one process, which share all memory
"""
    )


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "name",
    [
        "trn1.32xlarge",
        "local",
        "dl1.24xlarge x4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("trn2.48xlarge x4", "inf2.48xlarge")),
    ],
)
def test_pages_fit_a_terminal(run, name):
    out = run("all_reduce", "--bytes", "32MiB", "--cluster", name, *(["--group", "0-6"] * (name == "local")))[1]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_json(run):
    code, out = run("all_reduce", "--bytes", "32MiB", "--cluster", "trn2.48xlarge x4", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["schema_version"], found["op"], found["bytes"]) == (1, "all_reduce", 32 << 20)
    assert found["ranks"] == list(range(256))
    assert found["algorithm"] == "hierarchical"
    assert found["predicted_s"] <= min(each["predicted_s"] for each in found["alternatives"])
    assert found["steps"] > 0
    assert found["bytes_per_rank"] > 0
    assert set(found["hops"]) == {"chip", "neuronlink", "efa"}
    assert sum(found["breakdown"].values()) == pytest.approx(found["predicted_s"])
    assert {each["algorithm"] for each in found["not_applicable"]} == {"kangaring", "swing", "bucket", "direct"}
    assert found["extrapolated"] is True


def test_a_price_says_of_which_sizes_its_shape_was_measured(run):
    shape = ("all_gather", "--bytes", "1GiB", "--cluster", "trn1.32xlarge")
    assert "(extrapolated: measured at 0 B only)" in " ".join(run(*shape)[1].split())


def test_options_reach_the_plan(run):
    def predicted(*words):
        return json.loads(run(*words, "--json")[1])

    base = ("reduce_scatter", "--bytes", "32000000", "--cluster", "dl1.24xlarge x4")
    assert predicted(*base, "--exact")["algorithm"] in IN_RANK_ORDER
    group = ("all_reduce", "--bytes", "1G", "--cluster", "trn1.32xlarge", "--group", "0-7")
    assert predicted(*group)["ranks"] == list(range(8))
    assert [predicted(*group, "--dtype", name)["dtype"] for name in ("float32", "uint8")] == ["float32", "uint8"]
    rooted = ("broadcast", "--bytes", "1M", "--cluster", "trn1.32xlarge", "--group", "0-7")
    assert predicted(*rooted, "--root", "3")["ranks"] == list(range(8))


def test_the_plain_machine_has_as_many_ranks_as_asked_for(run):
    assert "on 7 ranks (0-6) of local" in run("all_reduce", "--bytes", "8", "--cluster", "local", "--group", "0-6")[1]
    two = json.loads(run("all_reduce", "--bytes", "8", "--cluster", "local x2", "--group", "0-3", "--json")[1])
    assert (two["cluster"], two["algorithm"] != "") == ("local x2", True)


def test_the_short_cut_is_priced(run):
    words = ("all_reduce", "--bytes", "1MiB", "--cluster", "local", "--group", "0-3")
    out = run(*words)[1]
    assert out.splitlines()[2] == "  direct"
    assert "  time goes to  40 us launch, 336 us copies in memory" in out
    assert json.loads(run(*words, "--json")[1])["algorithm"] == "direct"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("all_sum", "--bytes", "8", "--cluster", "local"), UsageError, "op: 'all_sum' is no collective"),
        (("all_reduce", "--bytes", "many", "--cluster", "local"), UsageError, "--bytes: 'many' is not a size"),
        (("all_reduce", "--bytes", "8", "--cluster", "trn9"), TopologyError, "unknown cluster 'trn9'"),
        (("all_reduce", "--bytes", "8", "--cluster", "local", "--group", "x"), TopologyError, "'x' is not a list"),
        (("all_reduce", "--bytes", "8", "--cluster", "trn1.2xlarge", "--group", "0-5"), TopologyError, "rank 2 is not"),
        (("all_reduce", "--bytes", "8", "--cluster", "trn1.32xlarge", "--group", "0-2"), TopologyError, "3 ranks"),
        (
            ("all_reduce", "--bytes", "8", "--cluster", "local", "--group", "0"),
            UsageError,
            "^--group: '0' is one rank, ",
        ),
        (
            ("broadcast", "--bytes", "8", "--cluster", "trn1.2xlarge", "--root", "2"),
            UsageError,
            "root: expected a rank of the group, 0 to 1, got 2",
        ),
    ],
)
def test_mistakes(run, words, error, message):
    with pytest.raises(error, match=message):
        run(*words)
