"""The drawing, as exact text."""

from pathlib import Path

import pytest

import topology
from topology.picture import draw

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
        (
            "trn1.32xlarge",
            "  neuronlink: aws-neuron/aws-neuron-sdk trn1-arch (384 GiB/s per chip = 4 links\n    x 2",
        ),
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
