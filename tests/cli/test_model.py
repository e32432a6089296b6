"""`overlap model`: the page at 80 columns, JSON, the search, and one line for what cannot be meant."""

import json
import re

import pytest

ON = ("llama-8b", "--layers", "2", "--sequence", "1024", "--cluster", "trn2.48xlarge")


@pytest.fixture
def told(overlap):
    """Return a function that simulates and returns what was printed."""

    def run(*argv):
        code, out, err = overlap("model", *argv)
        assert (code, err) == (0, "")
        return out

    return run


def test_the_page_has_its_verdict_last_and_fits_80_columns(told):
    lines = told(*ON, "--tp", "4", "--width", "80").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("llama-8b (1.49 billion parameters) on trn2.48xlarge, 64 ranks, virtual time")
    headings = [line.split("  ")[0] for line in lines]
    assert [each for each in headings if each in ("mean over ranks", "operation", "on the critical path")] == [
        "mean over ranks", "operation", "on the critical path",
    ]  # fmt: skip
    band = r"\(\+-\d+% typical, \+-\d+% in 80% of \d+ published steps of all classes that were left out\)"
    assert re.search(rf"step .* {band}: compute \d+%", " ".join(lines[-3:]))


def test_json_has_what_the_page_says(told):
    found = json.loads(told(*ON, "--tp", "4", "--pp", "2", "--json"))
    exposed = sum(each["wire_ns"] + each["waiting_ns"] for each in found["dimensions"].values())
    assert found["compute_ns"] + exposed + found["idle_ns"] == pytest.approx(found["step_ns"], abs=5)
    assert found["layout"]["dp"] == 8
    assert found["samples_per_s"] == pytest.approx(found["layout"]["global_batch"] / found["step_ns"] * 1e9)
    assert found["fits"] is True


@pytest.mark.slow
def test_the_search_says_what_it_left_out_and_then_tells_of_the_best(told):
    out = told(*ON[:-1], "trn2.3xlarge", "--search", "tp,pp,dp", "--global-batch", "8", "--width", "80")
    lines = out.splitlines()
    assert lines[0].startswith("searched for tp, pp, dp: ")
    assert any(" left out: " in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert lines[-2].startswith("step ") or lines[-1].startswith("step ")


@pytest.mark.slow
def test_a_search_leaves_the_samples_to_the_ranks_that_are_left(told):
    found = json.loads(told(*ON[:-1], "trn2.3xlarge", "--global-batch", "16", "--search", "tp", "--json"))
    assert found["layout"]["tp"] * found["layout"]["dp"] == 4
    assert found["search"]["tried"] == 3


@pytest.mark.slow
def test_what_does_not_fit_the_memory_says_so(told):
    out = told("llama-70b", "--layers", "8", "--sequence", "1024", "--cluster", "trn2.48xlarge",
               "--zero", "0", "--global-batch", "64")  # fmt: skip
    assert "DOES NOT FIT" in out


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["llama-8b"], '--cluster: expected a cluster, such as "trn2.48xlarge x16"'),
        ([*ON, "--tp", "7"], "tp x pp x cp: expected a divisor of the 64 ranks of trn2.48xlarge, got 7"),
        ([*ON, "--search", "tp", "--tp", "4"], "--search: tp is given, and cannot be searched for too; leave one out"),
        ([*ON, "--search", ""], "--search: expected names, such as tp,pp,dp, got ''"),
        ([*ON, "--search", "tp,"], "--search: expected names, such as tp,pp,dp, got 'tp,'"),
        (
            ["llama-405b", "--cluster", "trn2.48xlarge", "--search", "tp,dp"],
            "--search: none of 7 layouts fits llama-405b on trn2.48xlarge; most often: out of memory; "
            "take more nodes, or a smaller model",
        ),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(overlap, argv, expected):
    assert overlap("model", *argv) == (2, "", f"overlap: {expected}\n")


@pytest.mark.slow
def test_an_interrupted_search_tells_what_it_has_found(overlap, monkeypatch):
    from overlap.planning import search

    real, tried = search.estimate, []

    def interrupted(*args, **kwargs):
        if tried:
            raise KeyboardInterrupt
        tried.append(real(*args, **kwargs))
        return tried[0]

    monkeypatch.setattr(search, "estimate", interrupted)
    monkeypatch.setattr(search, "bound_s", lambda *args, **kwargs: 0.0)
    code, out, err = overlap("model", *ON[:-1], "trn2.3xlarge", "--search", "pp,dp", "--global-batch", "8")
    assert (code, err) == (130, "overlap: interrupted; 1 layouts were simulated\n")
    assert out.startswith("searched for pp, dp: 3 layouts, 1 simulated, and was interrupted\n")


@pytest.mark.parametrize(
    ("words", "computes"),
    [
        (("--layers", "100000"), 4 * 100_000 * 3),
        (("--layers", str(10**9)), 4 * 10**9 * 3),
        (("--layers", str(10**9), "--pp", "2"), 4 * 10**9 // 2 * 5),
        (("--layers", str(10**9), "--search", "tp"), 4 * 10**9 // 64),
        (("--schedule", "interleaved-1f1b", "--pp", "2", "--layers", "8", "--global-batch", str(10**9)), None),
    ],
)
def test_a_step_that_is_too_large_is_refused_before_anything_of_it_is_built(overlap, words, computes):
    """It took a minute, or all memory."""
    code, out, err = overlap("model", "llama-8b", "--cluster", "trn2.48xlarge", *words)
    assert (code, out) == (2, "")
    assert re.search(rf"^overlap: --layers: .* has {computes or '.*'} computes or more .* at most 20000: ", err), err
