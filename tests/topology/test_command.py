"""`overlap topology`: what it prints and returns, and the drawing, as exact text."""

import argparse
import io
import json
from pathlib import Path

import pytest

import topology
from overlap.cli import topology as command
from tests.errors import error_of
from topology import TopologyError, names
from topology.picture import draw

# -- `overlap topology`: what it prints and returns --------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TERM", raising=False)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    def run(*words):
        code = command.main(parser.parse_args(words))
        return code, capsys.readouterr().out

    return run


def test_a_text_in_memory_is_drawn_into(run, monkeypatch):
    monkeypatch.setattr("sys.stdout", text := io.StringIO())
    run("trn1.2xlarge")
    assert "\u2502" in text.getvalue()


def test_the_whole_page(run):
    code, out = run("trn1.32xlarge")
    assert code == 0
    assert "├───┤ device 1" in out
    assert "\nlegal groups on one node:\n    2 ranks: 0-1 | 2-3 | 4-5 | 6-7 | ... 16 in all\n" in out
    assert "\n   16 ranks: 0-15 | 16-31\n" in out
    assert (
        "\n  rule trn1-sixteen-halves (error): groups of 16 are cores 0-15 or 16-31\n"
        "    [aws-neuron/aws-neuron-sdk release notes (2023)]\n"
    ) in out
    assert out.endswith(
        "disjoint rings of devices in a node, each usable both ways:\n"
        "  0 1 2 3 7 4 5 6 10 11 8 9 13 14 15 12\n"
        "  0 3 15 11 7 6 2 14 10 9 5 1 13 12 8 4\n"
    )


@pytest.mark.parametrize("name", [*names(), "trn2u.48xlarge x4", "trn1.32xlarge x2"])
def test_every_page_fits_in_80_columns(run, name):
    assert max(map(len, run(name)[1].splitlines())) <= 80


def test_a_path_too_long_for_a_line_is_broken_after_a_slash(run):
    out = run("trn2.48xlarge")[1]
    assert (
        "\n  rule trn2-peers-lnc2 (warning): data-parallel peers should be directly linked\n"
        "    [aws-neuron/neuronx-distributed:src/neuronx_distributed/parallel_layers/\n"
        "    parallel_state.py]\n"
    ) in out


def test_a_dumb_terminal_gets_ascii(run, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert run("trn1.32xlarge")[1].isascii()


def test_machines_without_rules_or_rings(run):
    assert "legal groups: any\n" in run("local", "--ranks", "4")[1]
    assert "no ring of wires in a node\n" in run("inf2.24xlarge")[1]
    assert "3 through all 4 servers\n" in run("trn2u.48xlarge", "--ascii")[1]
    assert "legal groups on one node; across nodes the same on each:" in run("trn1.32xlarge", "--nodes", "2")[1]


def test_checking_a_group(run):
    assert run("trn1.32xlarge", "--group", "0-7") == (0, "legal: 0-7 on trn1.32xlarge: 8 ranks, 1 disjoint ring\n")
    code, out = run("inf2.48xlarge", "--group", "0-3")
    assert code == 0
    assert out.splitlines()[1].startswith("warning: rule inf2-ring-unused: a group of fewer than 24 ranks")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trn1.32xlarge", "--group", "0-6"],
            "group 0-6 of 7 ranks is not legal on trn1.32xlarge; rule trn1-sizes-2024",
        ),
        (["trn1.32xlarge", "--group", "0..3"], "--group: '0..3' is not a list of ranks"),
        (["trn1.32xlarge", "--lnc", "2"], "lnc: expected 1, found 2"),
        (["trn3", "--nodes", "2"], "unknown cluster 'trn3'"),
    ],
)
def test_mistakes_raise_for_the_front_door(run, words, message):
    assert message in str(error_of(TopologyError, run, *words))


def test_judgement_as_json(run):
    code, out = run("trn1.32xlarge", "--group", "0-6", "--json")
    verdict = json.loads(out)
    assert code == 2
    assert (verdict["legal"], verdict["nearest"][0]) == (False, list(range(8)))
    assert [finding["rule"] for finding in verdict["findings"]] == ["trn1-sizes-2024"]
    code, out = run("trn1.32xlarge", "--group", "0-7", "--json")
    verdict = json.loads(out)
    assert (code, verdict["legal"], verdict["findings"], verdict["nearest"]) == (0, True, [], [])


def test_everything_as_json(run):
    code, out = run("trn2.48xlarge", "--nodes", "2", "--lnc", "1", "--json")
    page = json.loads(out)
    assert code == 0
    assert (page["schema_version"], page["name"], page["nodes"], page["lnc"]) == (1, "trn2.48xlarge", 2, 1)
    assert (page["world_size"], page["ranks_per_node"], page["nic_share_bytes_per_s"]) == (256, 128, 3.125e9)
    assert page["devices"][5] == {
        "device": 5,
        "ranks": list(range(40, 48)),
        "connected_to": [1, 4, 6, 9],
        "numa": 0,
        "pcie": 2,
    }
    assert page["legal_groups"]["64"] == [[*range(32), *range(96, 128)], list(range(32, 96))]
    assert [len(ring) for ring in page["rings"]] == [256, 256]
    assert page["links"][0]["bandwidth_bytes_per_s"]["confidence"] == "D"


# -- the drawing, as exact text ----------------------------------------------------------------------------------------

TRN1_CORNER = """\
          │                 │                 │                 │
   ┌──────┴──────┐   ┌──────┴──────┐   ┌──────┴──────┐   ┌──────┴──────┐
───┤ device 0    ├───┤ device 1    ├───┤ device 2    ├───┤ device 3    ├───
   │ ranks 0-1   │   │ ranks 2-3   │   │ ranks 4-5   │   │ ranks 6-7   │
   │ efa 0       │   │ efa 0       │   │ efa 1       │   │ efa 1       │
   └──────┬──────┘   └──────┬──────┘   └──────┬──────┘   └──────┬──────┘
          │                 │                 │                 │
   ┌──────┴──────┐   ┌──────┴──────┐   ┌──────┴──────┐   ┌──────┴──────┐
───┤ device 4    ├───┤ device 5    ├───┤ device 6    ├───┤ device 7    ├───"""

INF2_24 = """\
inf2.24xlarge: 6 Inferentia2 chips in a chain
12 ranks

   +-------------+   +-------------+   +-------------+
   | device 0    +---+ device 1    +---+ device 2    |
   | ranks 0-1   |   | ranks 2-3   |   | ranks 4-5   |
   +-------------+   +-------------+   +------+------+
                                              |
   +-------------+   +-------------+   +------+------+
   | device 5    +---+ device 4    +---+ device 3    |
   | ranks 10-11 |   | ranks 8-9   |   | ranks 6-7   |
   +-------------+   +-------------+   +-------------+

device  ranks  connected to  nic   numa  pcie
---------------------------------------------
0       0-1    1             none  -     -
1       2-3    0,2           none  -     -
2       4-5    1,3           none  -     -
3       6-7    2,4           none  -     -
4       8-9    3,5           none  -     -
5       10-11  4             none  -     -

link        GB/s one way  latency us  confidence
------------------------------------------------
chip        272.00        1.3         D/A
neuronlink  51.54         1.5         D/D
sources of the bandwidths:
  chip: aws-neuron/aws-neuron-sdk:nki/deep-dives/nki-dma-bandwidth-guide.rst
    (DMA engines of one core)
"""

INF2_48 = """\
  ┌─────────┐  ┌─────────┐  ┌─────────┐  ┌─────────┐  ┌─────────┐  ┌─────────┐
  │ dev 0   ├──┤ dev 1   ├──┤ dev 2   ├──┤ dev 3   ├──┤ dev 4   ├──┤ dev 5   │
  │ r 0-1   │  │ r 2-3   │  │ r 4-5   │  │ r 6-7   │  │ r 8-9   │  │ r 10-11 │
  └────┬────┘  └─────────┘  └─────────┘  └─────────┘  └─────────┘  └────┬────┘
       │                                                                │
  ┌────┴────┐  ┌─────────┐  ┌─────────┐  ┌─────────┐  ┌─────────┐  ┌────┴────┐
  │ dev 11  ├──┤ dev 10  ├──┤ dev 9   ├──┤ dev 8   ├──┤ dev 7   ├──┤ dev 6   │
  │ r 22-23 │  │ r 20-21 │  │ r 18-19 │  │ r 16-17 │  │ r 14-15 │  │ r 12-13 │
  └─────────┘  └─────────┘  └─────────┘  └─────────┘  └─────────┘  └─────────┘
"""

INF2_48_WIDE = """\
   └──────┬──────┘   └─────────────┘   └─────────────┘   └─────────────┘   └─────────────┘   └──────┬──────┘
          │                                                                                         │
   ┌──────┴──────┐   ┌─────────────┐   ┌─────────────┐   ┌─────────────┐   ┌─────────────┐   ┌──────┴──────┐
   │ device 11   ├───┤ device 10   ├───┤ device 9    ├───┤ device 8    ├───┤ device 7    ├───┤ device 6    │"""

SWITCHED = """\
   │ device 0 │   │ device 1 │   │ device 2 │   │ device 3 │
   │ rank 0   │   │ rank 1   │   │ rank 2   │   │ rank 3   │
   │ efa 0    │   │ efa 1    │   │ efa 2    │   │ efa 3    │
   └──────────┘   └──────────┘   └──────────┘   └──────────┘
   ┌──────────┐   ┌──────────┐   ┌──────────┐   ┌──────────┐
   │ device 4 │   │ device 5 │   │ device 6 │   │ device 7 │
   │ rank 4   │   │ rank 5   │   │ rank 6   │   │ rank 7   │
   │ efa 4    │   │ efa 5    │   │ efa 6    │   │ efa 7    │
   └──────────┘   └──────────┘   └──────────┘   └──────────┘
   nvlink from every device to one switch
"""


def test_torus():
    assert TRN1_CORNER in draw(topology.cluster("trn1.32xlarge"))


def test_chain_in_ascii():
    text = draw(topology.cluster("inf2.24xlarge"), ascii=True)
    assert text.startswith(INF2_24)
    assert text.endswith("\n\nbisection 51.5 GB/s one way . 3 CC-cores per rank")


def test_ring_is_folded():
    text = draw(topology.cluster("inf2.48xlarge"))
    assert INF2_48 in text
    assert [line.split() for line in text.splitlines() if line and not line.strip(" │")] == [["│", "│"]]
    assert INF2_48_WIDE in draw(topology.cluster("inf2.48xlarge"), width=110)


def test_a_switch_joins_rows_of_four():
    assert SWITCHED in draw(topology.cluster(str(Path(__file__).parents[1] / "switched.toml")))


def test_no_picture_where_it_is_too_narrow():
    assert "dev 0" not in draw(topology.cluster("inf2.48xlarge"), width=60)


def test_rows_of_trn2_say_their_numa_node():
    lines = draw(topology.cluster("trn2.48xlarge")).splitlines()
    assert [line.split("NUMA ")[1] for line in lines if "NUMA" in line] == ["1", "0", "0", "1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trn2.48xlarge", "\n64 ranks (LNC=2)\n"),
        ("trn1.32xlarge x2", "\n2 nodes of 32 ranks, 64 ranks in all; node 0 is shown\n"),
        ("trn2u.48xlarge", "device d also to device d of the servers before and after, in a ring of 4\n"),
        ("dl1.24xlarge", "   roce from every device to every other\n"),
        ("local", "\n1 rank\n"),
        ("trn1.32xlarge", "  neuronlink: aws-neuron/aws-neuron-sdk trn1-arch (384 GiB/s per chip = 4 links\n    x 2"),
        ("dl1.24xlarge", "network 6.25 GB/s per rank"),
    ],
)
def test_remarks(name, text):
    assert text in draw(topology.cluster(name))


@pytest.mark.parametrize("name", topology.names())
def test_ascii_is_ascii_and_no_line_ends_in_a_blank(name):
    text = draw(topology.cluster(name), ascii=True)
    assert text.isascii()
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert max(map(len, text.splitlines())) <= 80
    assert ("device 0" in text or "dev 0" in text) == (topology.cluster(name).devices_per_node <= 16)
    assert ("all others" in text) == (16 < topology.cluster(name).devices_per_node < 65)


def test_unused_devices_and_large_machines():
    assert "no rank" in draw(topology.cluster("trn1.32xlarge", ranks=8))
    assert "device" not in draw(topology.cluster("local", ranks=100))
