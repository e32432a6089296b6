"""Verdicts on hangs from dumps of PyTorch's flight recorder: planted with gloo, and written as NCCL writes them."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

import overlap
from overlap.errors import UsageError
from overlap.explain.hang import PAGE_LINES, is_or_has_dump, judge_stuck_job
from overlap.flight.dumps import read_dump
from overlap.flight.pickles import unpickle_plain
from overlap.timeline.files import children

LIMIT_S = 280
FRAMES = [
    {"filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 3245, "name": "all_reduce"},
    {"filename": "/home/me/train.py", "line": 33, "name": "main"},
]


def entry(number, name="all_reduce", *, sizes=((8,),), dtype="Float", done=False, group=("0", "default_pg"), line=33):
    message = name.startswith(("send", "recv"))
    frames = [FRAMES[0], FRAMES[1] | {"line": line}]
    shapes = [list(size) for size in sizes]
    return {
        "record_id": number, "pg_id": 0, "process_group": group, "collective_seq_id": 0 if message else number,
        "p2p_seq_id": number if message else 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "input_sizes": shapes, "output_sizes": shapes, "input_dtypes": [dtype], "output_dtypes": [dtype],
        "state": "completed" if done else "started", "retired": done, "is_p2p": message, "frames": frames,
        "time_created_ns": 1000 + number, "time_discovered_started_ns": 1, "time_discovered_completed_ns": None,
    }  # fmt: skip


def write(folder, ranks, *, version="2.10", groups=None, prefix="nccl_trace_rank_", form=pickle.dumps):
    """Write a dump for each rank; None stands for a rank without one."""
    folder.mkdir(exist_ok=True)
    groups = groups or {"0": ("default_pg", range(len(ranks)))}
    for rank, entries in enumerate(ranks):
        config = {name: {"name": name, "desc": desc, "ranks": str(list(of))} for name, (desc, of) in groups.items()
                  if rank in of}  # fmt: skip
        if entries is not None:
            content = form({"version": version, "pg_config": config, "entries": entries, "pg_status": {}})
            (folder / f"{prefix}{rank}").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def sentence(*paths):
    return judge_stuck_job(paths).sentence


FIRST = entry(1, done=True, line=8)


@pytest.mark.parametrize("version", ["2.0", "2.4", "2.10"])
@pytest.mark.parametrize("form", [pickle.dumps, lambda data: pickle.dumps(data, 2), json.dumps])
def test_a_rank_that_is_behind(tmp_path, version, form):
    folder = write(tmp_path / "d", [[FIRST, entry(2)], [FIRST], [FIRST, entry(2)]], version=version, form=form)
    assert is_or_has_dump(folder)
    assert is_or_has_dump(folder / "nccl_trace_rank_1")
    assert sentence(folder) == (
        "rank 1 has not come: its last call was all_reduce #1 of group 'default_pg' (train.py:8 in main); ranks 0, 2 "
        "wait for it in all_reduce #2 of group 'default_pg' (train.py:33 in main)"
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (entry(2, sizes=[(4, 4)], line=9), ("all_reduce", "float [16]", "sizes")),
        (entry(2, dtype="Half", line=9), ("all_reduce", "half [8]", "dtypes")),
        (entry(2, "barrier", sizes=[], dtype="", line=9), ("barrier", "", "operations")),
    ],
)
def test_a_rank_that_differs(tmp_path, other, expected):
    folder = write(tmp_path / "d", [[FIRST, entry(2)], [FIRST, other], [FIRST, entry(2)]])
    name, form, differs = expected
    assert sentence(folder) == (
        f"rank 1 called {name} #2 of group 'default_pg' (train.py:9 in main){f' with {form}' if form else ''}, where "
        "ranks 0, 2 called all_reduce #2 of group 'default_pg' (train.py:33 in main) with float [8] "
        f"({differs} differ)"
    )


def test_shapes_of_one_size_are_no_mismatch(tmp_path):
    folder = write(tmp_path / "d", [[entry(2)], [entry(2, sizes=[(2, 4)])]])
    assert sentence(folder).startswith("cannot be told: all known members have called all_reduce #2")


def test_a_mismatch_that_has_ended_is_not_the_reason_why_a_rank_waits(tmp_path):
    wrong = entry(1, sizes=[(9,)], done=True)
    hang = judge_stuck_job([write(tmp_path / "d", [[FIRST, entry(2)], [wrong], [FIRST, entry(2)]])])
    assert (hang.verdict, hang.ranks) == ("late", (1,))
    assert hang.notes[0].startswith(
        "before it: rank 1 called all_reduce #1 of group 'default_pg' (train.py:33 in main) with float [9]"
    )


def test_uneven_all_to_alls_are_no_mismatch(tmp_path):
    ranks = [[entry(1, "all_to_all", sizes=[(size,)], done=True), entry(2)] for size in (3, 5)]
    assert judge_stuck_job([write(tmp_path / "d", ranks)]).verdict == "wire"


def test_groups_that_wait_in_a_circle(tmp_path):
    groups = {"1": ("tp", [0, 1]), "2": ("dp", [0, 1])}
    one, two = entry(1, group=("1", "tp"), line=5), entry(1, group=("2", "dp"), line=6)
    hang = judge_stuck_job([write(tmp_path / "d", [[one], [two]], groups=groups)])
    assert (hang.verdict, hang.ranks) == ("cycle", (0, 1))
    assert hang.sentence == (
        "ranks 0-1 wait for each other and cannot go on: rank 0 in all_reduce #1 of group 'tp' (train.py:5 in main), "
        "rank 1 in all_reduce #1 of group 'dp' (train.py:6 in main); call the operations of all groups that ranks "
        "share in one order"
    )


def test_a_rank_that_waits_in_another_group_is_not_behind(tmp_path):
    """Rank 0 waits for 1, which waits in its own group for 2: that is the one."""
    groups = {"0": ("default_pg", [0, 1, 2]), "1": ("tp", [1, 2])}
    ranks = [[entry(2)], [entry(7, group=("1", "tp"))], [entry(6, group=("1", "tp"), done=True)]]
    hang = judge_stuck_job([write(tmp_path / "d", ranks, groups=groups)])
    assert (hang.verdict, hang.ranks) == ("late", (2,))


def test_a_send_without_a_receive(tmp_path):
    ranks = [[FIRST, entry(1, "send 0->1")], [FIRST], [FIRST]]
    assert sentence(write(tmp_path / "d", ranks)).startswith(
        "rank 1 has not come: its last call was all_reduce #1 of group 'default_pg' (train.py:8 in main); rank 0 waits "
        "for it in send #1 to rank 1 (train.py:33 in main)"
    )
    met = [[FIRST, entry(1, "send 0->1")], [FIRST, entry(3, "recv 1<-0", sizes=[(9,)])], [FIRST]]
    assert "(sizes differ)" in sentence(write(tmp_path / "e", met))


@pytest.mark.parametrize("done", [True, False])
def test_operations_of_a_batch_end_with_it(tmp_path, done):
    """The recorder leaves them scheduled: only the entry at the end of the batch has a state."""
    batches = []
    for own, peer in ((0, 1), (1, 0)):
        parts = [entry(5, name, done=False) for name in (f"send {own}->{peer}", f"recv {own}<-{peer}")]
        end = entry(5, "coalesced", sizes=[], done=done) | {"is_p2p": True, "p2p_seq_id": 5, "collective_seq_id": 0}
        batches.append([FIRST, *parts, end])
    hang = judge_stuck_job([write(tmp_path / "d", [*batches, [FIRST]])])
    assert hang.verdict == ("nobody" if done else "wire")
    batches[1] = [FIRST]
    hang = judge_stuck_job([write(tmp_path / "e", [*batches, [FIRST]])])
    assert (hang.verdict, list(hang.ranks)) == (("nobody", []) if done else ("late", [1]))


def test_a_missing_dump(tmp_path):
    folder = write(tmp_path / "d", [[FIRST, entry(2)], None, [FIRST, entry(2)], None])
    hang = judge_stuck_job([folder])
    assert (hang.verdict, hang.ranks, hang.missing) == ("missing", (1, 3), [1, 3])
    assert hang.sentence == (
        "cannot be told: ranks 1, 3 have no record here; ranks 0, 2 wait for them in all_reduce #2 of group "
        "'default_pg' (train.py:33 in main)"
    )


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_ranks_without_a_dump_are_not_accused_where_all_operations_have_ended(tmp_path, library):
    ended = [each | {"profiling_name": f"{library}:all_reduce"} for each in (FIRST, entry(2, done=True))]
    hang = judge_stuck_job([write(tmp_path / "d", [ended, None, ended, None])])
    assert (hang.verdict, hang.ranks) == ("nobody", ())


def test_a_rank_whose_operation_is_only_scheduled_is_late(tmp_path):
    queued = entry(2) | {"state": "scheduled"}
    hang = judge_stuck_job([write(tmp_path / "d", [[FIRST, entry(2)], [FIRST, queued], [FIRST, entry(2)]])])
    assert (hang.verdict, hang.ranks) == ("late", (1,))
    assert "is queued, and has not started; ranks 0, 2 wait for it" in hang.sentence
    hang = judge_stuck_job(
        [write(tmp_path / "e", [[FIRST, queued], [FIRST, queued], [FIRST, queued], [FIRST, entry(2)]])]
    )
    assert hang.ranks == (0, 1, 2)


def test_a_cycle_of_receives_that_gloo_does_not_record(tmp_path):
    ended = [
        entry(number, done=True) | {"profiling_name": "gloo:all_reduce", "state": "scheduled"} for number in (1, 2)
    ]
    hang = judge_stuck_job([write(tmp_path / "d", [ended, ended])])
    assert hang.sentence == (
        "cannot be told: no rank waits for another in a recorded operation; sends and receives of gloo are not recorded"
    )


def test_the_last_of_two_runs(tmp_path):
    write(tmp_path / "d", [[FIRST, entry(2)], [FIRST]], prefix="a_")
    write(tmp_path / "d", [[FIRST], [FIRST, entry(9)]], prefix="b_")
    hang = judge_stuck_job([tmp_path / "d"])
    assert hang.ranks == (0,)
    assert hang.notes == ["of 2 runs in these files this is the last (b_*)"]


def test_a_page_has_at_most_its_lines(tmp_path):
    folder = write(tmp_path / "d", [[FIRST, entry(2)] for _ in range(99)] + [[FIRST]])
    page = judge_stuck_job([folder]).page
    assert len(page) == PAGE_LINES
    assert page[-1].endswith("ranks more (--all)")
    assert len(judge_stuck_job([folder], full=True).page) > 100


@pytest.mark.parametrize("columns", [60, 110])
def test_a_page_obeys_columns_and_cuts_nothing_off(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    folder = write(tmp_path / "d", [[FIRST, entry(2)] for _ in range(99)] + [[FIRST]])
    found = overlap.why(folder)
    lines = str(found).splitlines()
    assert columns - 25 < max(map(len, lines)) <= columns
    assert len(lines) <= PAGE_LINES
    assert " ".join(found.verdict.split()) in " ".join(str(found).split())


def test_the_verdict_as_data(tmp_path):
    data = json.loads(json.dumps(overlap.why(write(tmp_path / "d", [[FIRST, entry(2)], [FIRST]])).as_dict()["hang"]))
    assert (data["schema"], data["version"], data["verdict"], data["ranks"]) == ("overlap.hang", 2, "late", [1])
    assert data["operations"][0]["line"] == "train.py:33 in main"


class Malicious:
    def __reduce__(self):
        return os.system, ("touch was-run",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump_0"
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [Malicious()]}, protocol))
    with pytest.raises(UsageError, match="could run code"):
        read_dump(path)
    assert not Path("was-run").exists()


@pytest.mark.parametrize("depth", [60, 5000])
def test_lists_that_contain_each_other_end(tmp_path, depth):
    """They would make an endless text, or an endless hash."""
    head = pickle.dumps({"version": "2.10", "pg_config": {}, "entries": []}, 2)
    text = b"X\x07\x00\x00\x00entries"
    nest = b"]q\x63" + b"](h\x63h\x63eq\x63" * depth + b"h\x63"  # a list of twice the list before, and so on
    key = b"X\x0d\x00\x00\x00process_group"
    path = tmp_path / "dump_0"
    path.write_bytes(head[:-1] + text + b"]}" + key + b"(" + nest + b"tsas.")
    with pytest.raises(UsageError, match="dump_0: is damaged, or no dump: TypeError: text expected, got list"):
        read_dump(path)
    nested = b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * depth + b"K\x01s."
    with pytest.raises(ValueError, match="a key that is neither text nor number"):
        unpickle_plain(nested)


def test_damaged_dumps_cost_a_sentence(tmp_path):
    """Each byte may be missing or another one: a dump is read, or refused in a sentence."""
    [path] = write(tmp_path / "d", [[FIRST, entry(2, "send 0->1")]]).iterdir()
    whole, chance = path.read_bytes(), random.Random(1)
    outcomes = set()
    for _ in range(1500):
        content = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(4)):
            if content:
                content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content)
        try:
            read_dump(path)
            outcomes.add("read")
        except UsageError as error:
            outcomes.add(str(error).partition(":")[0])
    assert outcomes == {"read", str(path)}


def test_a_dump_of_another_version(tmp_path):
    folder = write(tmp_path / "d", [[FIRST]], version="3.0")
    with pytest.raises(UsageError, match=r"is of version 3.0 of the flight recorder, not 2.x; leave it out"):
        judge_stuck_job([folder])


def test_one_damaged_dump_of_several_is_named(tmp_path):
    folder = write(tmp_path / "d", [[FIRST, entry(2)], [FIRST], [FIRST, entry(2)]])
    (folder / "nccl_trace_rank_2").write_bytes((folder / "nccl_trace_rank_2").read_bytes()[:-50] + b"pg_config")
    hang = judge_stuck_job([folder])
    assert hang.ranks == (1,)
    assert "nccl_trace_rank_2: is damaged" in hang.notes[-1]


# -- planted hangs -------------------------------------------------------------------------------------------------

PLANTED = Path(__file__).with_name("planted.py")
RIVAL = """
import contextlib, io, pathlib, pickle, sys, traceback
from torch.distributed.flight_recorder.fr_trace import main
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    print("==", folder.name, flush=True)
    try:
        main([str(folder), "-p", "trace_", "--allow-incomplete-ranks"])
    except BaseException:
        traceback.print_exc(file=sys.stdout)
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path_factory.mktemp("planted")
    subprocess.run([sys.executable, PLANTED, folder], capture_output=True, timeout=LIMIT_S, check=True)
    return folder


LATE = (
    r"rank {} has not come: its last call was all_reduce #1 .*, or it waits in one of the sends and receives of gloo, "
    r"which are not recorded; ranks {} wait for it in {} #2 .*planted.py:\d+ in {}"
)
CASES = {
    "did_not_come": LATE.format(1, "0, 2", "all_reduce", "did_not_come"),
    "size": r"rank \d called all_reduce #2.* with float \[(8|16)\], where .* with float \[(8|16)\] .sizes differ",
    "operation": r"rank 2 called broadcast #2 .* with float \[8\], where ranks 0-1 called all_reduce #2 .*operat",
    "order": r"rank 0 called broadcast #2 .* before all_reduce #2 .*, ranks 1-2 in the other order: call the oper",
    "dtype": r"rank \d called all_reduce #2.* with (double|float) \[8\], where .* \(dtypes differ\)",
    "send_without_receive": LATE.format(0, "1-2", "all_reduce", "send_without_receive"),
    "circle": r"ranks 0-2 wait for each other and cannot go on: rank 0 in all_reduce #2 of group 'tp' .planted.py:",
    "raised": LATE.format(2, "0-1", "barrier", "raised"),
    "missing": r"cannot be told: rank 1 has no record here; ranks 0, 2 wait for it in all_reduce #2 ",
    "compute": LATE.format(0, "1-2", "all_reduce", "compute"),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_a_planted_hang_is_named(planted, case):
    assert re.match(CASES[case], sentence(planted / case))
    assert len(judge_stuck_job([planted / case]).page) <= PAGE_LINES


@pytest.mark.torch
def test_torchs_own_analysis_says_no_more(planted, tmp_path):
    """Gloo lists no members, without which it fails: they are added for it. Each rank that it names is on our page."""
    for case in CASES:
        (tmp_path / case).mkdir()
        for path in (planted / case).glob("trace_*"):
            dump = pickle.loads(path.read_bytes())
            names = {tuple(call["process_group"]) for call in dump["entries"]}
            dump["pg_config"] = {name: {"name": name, "desc": desc, "ranks": "[0, 1, 2]"} for name, desc in names}
            (tmp_path / case / path.name).write_bytes(pickle.dumps(dump, 2))
    done = subprocess.run([sys.executable, "-c", RIVAL, tmp_path], capture_output=True, text=True, timeout=LIMIT_S)
    named = 0
    for part in (done.stdout + done.stderr).split("== ")[1:]:
        hang = judge_stuck_job([planted / part.split()[0]])
        for ranks in re.findall(r"missing ranks: \{([\d, ]+)\}|Culprit rank (\d+)", part):
            for rank in re.findall(r"\d+", " ".join(ranks)):
                named += 1
                assert any(line.split()[:1] == [rank] for line in hang.page), (part, hang.sentence)
    assert named > 3


def test_a_group_that_one_rank_called_and_whose_members_no_dump_lists(tmp_path):
    """As gloo's dumps are of groups in which the other members have issued nothing."""
    groups = {"0": ("default_pg", [0, 1, 2]), "1": ("tp", [])}
    ranks = [[FIRST, entry(1, group=("1", "tp"))], [FIRST], [FIRST]]
    hang = judge_stuck_job([write(tmp_path / "d", ranks, groups=groups)])
    assert (hang.verdict, hang.ranks) == ("wire", ())
    assert hang.sentence == (
        "cannot be told: no record lists the members of the group of all_reduce #1 of group 'tp' (train.py:33 in "
        "main), and it has not ended: the network, a device or a rank without a record"
    )


def test_processes_read_many_dumps_alike(tmp_path, monkeypatch):
    folder = write(tmp_path / "d", [[FIRST, entry(2)], [FIRST], [FIRST, entry(2)]])
    (folder / "nccl_trace_rank_3").write_bytes(b"\x80\x02pg_config")
    alone = judge_stuck_job([folder])
    monkeypatch.setattr(children, "SMALL_BYTES", 0)
    assert judge_stuck_job([folder]) == alone
    assert alone.ranks == (1,)
    assert "nccl_trace_rank_3: is damaged" in alone.notes[-1]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_data_of_every_kind_is_read(protocol):
    data = {"a": [1, -1, 255, 256, 70_000, -70_000, 1 << 40, 1.5, None, True, False], "b": (1, ("x", 2), ()),
            "c": ["text", "é" * 300, {}, {"k": [{"l": (1, 2, 3, 4)}]}],
            7: [[i, str(i)] for i in range(400)]}  # fmt: skip
    assert unpickle_plain(pickle.dumps(data, protocol)) == data


def test_equal_dicts_of_a_pickle_differ_after_an_index_is_bound_again():
    def text(letter, index):
        return b"X\x01\x00\x00\x00" + letter + b"q" + index

    same = b"}(h\x00h\x01u"
    content = b"\x80\x02](" + text(b"k", b"\x00") + text(b"a", b"\x01") + same + text(b"b", b"\x01") + same + b"e."
    assert unpickle_plain(content) == pickle.loads(content) == ["k", "a", {"k": "a"}, "b", {"k": "b"}]


def test_a_rank_that_is_in_a_group_of_unknown_members_is_not_blamed(tmp_path):
    """Gloo lists no members: rank 1 may wait for rank 0 in their group."""
    gloo = {"profiling_name": "gloo:all_reduce", "state": "scheduled"}
    first = FIRST | gloo
    pair = entry(1, group=("7", "pair"), line=50) | gloo
    folder = write(tmp_path, [[first], [first, pair], [first, entry(2) | gloo], [first, entry(2) | gloo]])
    found = judge_stuck_job([folder])
    assert found.ranks == (0,)
    assert found.sentence.startswith("rank 0 has not come: its last call was all_reduce #1 ")
    (row,) = (line for line in found.page if line.split()[:1] == ["1"])
    assert row.split(maxsplit=3)[3] == "all_reduce #1 of group 'pair' (train.py:50 in main)"


def test_one_rank_ahead_of_most_may_have_called_too_much(tmp_path):
    folder = write(tmp_path, [[FIRST], [FIRST], [FIRST, entry(2)]])
    assert sentence(folder).endswith(
        "(train.py:8 in main), or rank 2 called one too many; rank 2 waits for them in all_reduce #2 of group "
        "'default_pg' (train.py:33 in main)"
    )


def test_roots_that_may_differ_are_named(tmp_path):
    folder = write(tmp_path, [[FIRST, entry(2, "broadcast")], [FIRST, entry(2, "broadcast")]])
    assert sentence(folder).endswith("the network, a device or roots that differ")
