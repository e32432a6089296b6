"""`overlap topology`: what it prints and returns."""

import argparse
import io
import json

import pytest

from overlap.cli import topology as command
from topology import TopologyError, names


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("TERM", raising=False)
    parser = argparse.ArgumentParser()
    command.fill(parser)

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
    assert run("trn1.32xlarge", "--group", "0-7") == (
        0,
        "legal: 0-7 on trn1.32xlarge: 8 ranks, 1 disjoint ring\n",
    )
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
        (["trn1.32xlarge", "--group", "0..3"], "'0..3' is not a list of ranks"),
        (["trn1.32xlarge", "--lnc", "2"], "lnc: expected 1, found 2"),
        (["trn3", "--nodes", "2"], "unknown cluster 'trn3'"),
    ],
)
def test_mistakes_raise_for_the_front_door(run, words, message):
    with pytest.raises(TopologyError) as caught:
        run(*words)
    assert message in str(caught.value)


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
