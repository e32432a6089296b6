"""Checkpoints: complete or not there, the same bits on any number of ranks, and what is refused."""

import json
import os
import threading

import ml_dtypes
import numpy as np
import pytest
import xxhash
from safetensors import safe_open

import overlap
from overlap import parallel
from overlap.parallel.checkpoints.pieces import Shard, pieces_of_rank
from overlap.state.files import SavedFile
from overlap.state.saves import CHECKPOINTS, Saves
from tests.errors import error_from, error_of
from tests.interpreters import launch

from .example_hooks import power_sgd, top_k
from .programs import backward, forward, loss_gradient, samples, weights

ADAM = parallel.Adam(1e-2)
SLOW = (("data", True), ("stage 1", False), ("stage 1", True), ("stage 2", False), ("stage 3", True))


def makes(strategy, hook=None, **options):
    """Return a function that makes a model of parameters; `hook` makes its hook."""

    def make(rank, params):
        return strategy(rank, params, optimizer=ADAM, bucket_bytes=300, hook=hook and hook(), **options)

    return make


MAKES = {
    "data": makes(parallel.DataParallel),
    **{f"stage {stage}": makes(parallel.Sharded, stage=stage) for stage in (1, 2, 3)},
    "top k": makes(parallel.DataParallel, lambda: top_k(0.2)),
    "power_sgd": makes(parallel.DataParallel, lambda: power_sgd(1, warm_up=1)),
    "stage 2, top k": makes(parallel.Sharded, lambda: top_k(0.2), stage=2),
}


async def save_now(checkpoints, model):
    """Save a model, and wait until all of it is written."""
    await checkpoints.save(model)
    await checkpoints.finish()


async def steps(rank, model, until):
    """Train on the global batches of the steps that are left."""
    names = list(weights())
    for step in range(model.steps, until):
        x, y = samples(step)[:, rank.rank :: rank.world_size]
        acts = {}
        for name in names:
            acts[name], x = x, rank.compute(forward, model[name], x)
        grad = rank.compute(loss_gradient, x, y)
        for name in reversed(names):
            back = rank.compute(backward, model[name], acts[name], grad)
            grad = back[0]
            model.reduce(name, back[1])
        model.step()


def bits(tree):
    return {name: np.asarray(w).tobytes() for name, w in tree.items()}


def complete_steps(folder):
    return [save.step for save in Saves(folder, CHECKPOINTS).list_complete()]


def checkpoint(folder, step):
    """Return the folder of the complete checkpoint of a step."""
    saves = Saves(folder, CHECKPOINTS)
    [path] = [saves.folder_of(save) for save in saves.list_complete() if save.step == step]
    return path


def training(folder, make, *, ranks, save_at=(), until, **options):
    """Restore, train, save; return of each rank what it restored, and the weights."""

    async def main(rank):
        model = MAKES[make](rank, weights(seed=rank.rank + 10 if os.listdir(folder) else 0))
        checkpoints = parallel.Checkpoints(rank, folder, **options)
        restored = await checkpoints.restore(model)
        begun = bits(await model.finish()) if restored else None
        for step in (*save_at, until):
            await steps(rank, model, step)
            if step in save_at:
                await checkpoints.save(model, {"at": step})
        await checkpoints.finish()
        return restored, begun, bits(await model.finish())

    return overlap.run(main, ranks=ranks, timeout_s=60)


@pytest.mark.parametrize("make", ["data", "stage 1", "stage 2", "stage 3"])
def test_a_weight_without_elements_is_in_no_checkpoint_and_hinders_no_restore(make, tmp_path):
    async def main(rank):
        model = MAKES[make](rank, {"w": np.zeros(5, np.float32), "empty": np.zeros((3, 0), np.float32)})
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        await checkpoints.restore(model)
        before = model.steps
        for name in ("w", "empty"):
            model.reduce(name, rank.compute(np.ones_like, model[name]))
        await model.step()
        await save_now(checkpoints, model)
        return before, bits(await model.finish())["w"]

    first, second = (overlap.run(main, ranks=ranks, timeout_s=60) for ranks in (2, 3))
    assert [[before for before, _ in run] for run in (first, second)] == [[0] * 2, [1] * 3]
    assert len(set(second)) == 1
    assert second[0] != first[0]


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        ("data", False),
        ("stage 2", True),
        ("stage 3", False),
        ("top k", True),
        ("power_sgd", False),
        ("stage 2, top k", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_training_goes_on_as_if_it_had_not_ended(tmp_path, make, whole):
    """From other weights, which the checkpoint must replace, and with the state of optimizers and hooks."""
    (tmp_path / "through").mkdir()
    through = training(tmp_path / "through", make, ranks=2, until=6)
    folder = tmp_path / "run"
    folder.mkdir()
    training(folder, make, ranks=2, save_at=(3,), until=3, whole=whole)
    for (restored, _, found), (_, _, expected) in zip(training(folder, make, ranks=2, until=6), through, strict=True):
        assert (restored.step, restored.ranks, restored.exact, restored.why) == (3, 2, True, "")
        assert restored.extra == {"at": 3}
        assert found == expected


@pytest.mark.parametrize(
    ("saves", "resumes", "ranks"), [("data", "stage 3", 3), ("stage 3", "data", 1), ("stage 2", "stage 1", 3)]
)
def test_other_ranks_and_another_strategy_begin_with_the_same_bits(tmp_path, saves, resumes, ranks, capsys):
    saved = training(tmp_path, saves, ranks=2, save_at=(2,), until=2)
    capsys.readouterr()
    for restored, begun, _ in training(tmp_path, resumes, ranks=ranks, until=2):
        assert begun == saved[0][2]
        assert not restored.exact
        why = f"2 ranks saved it and {ranks} go on, and gradients that are means of other parts round differently"
        assert restored.why == why
    told = f"checkpoint of step 2: its bits are all here, those of later steps will be others: {why}"
    assert capsys.readouterr().err.count(told) == 1


def test_another_number_of_ranks_begins_with_the_hook_anew(tmp_path):
    training(tmp_path, "top k", ranks=2, save_at=(2,), until=2)
    for restored, _, _ in training(tmp_path, "top k", ranks=3, until=2):
        assert restored.why.startswith("the state of hooks starts from the beginning; 2 ranks saved it and 3 go on")


def test_buckets_travel_in_the_order_that_they_had(tmp_path):
    """Which decides on bits wherever a ring adds up: the first step after a restart has the order of those before."""

    async def main(rank, steps):
        model = parallel.DataParallel(rank, weights(), optimizer=ADAM, bucket_bytes=300)
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        await checkpoints.restore(model)
        before = [plan.names for plan in model.plans]
        for _ in range(steps):
            for name in ("w2", "w0", "w3", "w1"):
                model.reduce(name, np.ones((6, 6)))
            model.step()
        await save_now(checkpoints, model)
        return before, [plan.names for plan in model.plans]

    first = [("w3", "w2"), ("w1", "w0")], [("w2", "w0"), ("w3", "w1")]
    assert overlap.run(main, 1, ranks=2, timeout_s=60) == [first] * 2
    assert overlap.run(main, 0, ranks=2, timeout_s=60) == [(first[1], first[1])] * 2


async def cut(rank, folder, dp, until):
    """A model of two stages, each cut in two, whose weights have the same names in all parts."""
    mesh = rank.mesh(pp=2, dp=dp, tp=2)
    place = mesh.coordinates["pp"], mesh.coordinates["tp"]
    made = {"w": np.full(3, 10.0 * place[0] + place[1] + (100 if until == 3 else 0))}
    model = parallel.Sharded(rank, made, optimizer=ADAM, group=mesh["dp"])
    checkpoints = parallel.Checkpoints(rank, folder, cuts={"w": parallel.Cut(f"stage {place[0]}, tp {place[1]}/w")})
    restored = await checkpoints.restore(model)
    for _ in range(model.steps, until):
        model.reduce("w", np.arange(3.0) + place[0] - place[1])
        model.step()
    await save_now(checkpoints, model)
    return place, restored and restored.exact, (await model.finish())["w"].tolist()


def test_a_checkpoint_has_all_parts_of_a_model(tmp_path):
    through = overlap.run(cut, tmp_path / "through", 2, 4, ranks=8, timeout_s=60)
    first = overlap.run(cut, tmp_path / "run", 2, 2, ranks=8, timeout_s=60)
    assert len({str(found) for _, _, found in first}) == 4
    assert overlap.run(cut, tmp_path / "run", 2, 3, ranks=8, timeout_s=60)[0][1] is True
    parts = {place: found for place, _, found in through}
    for place, exact, found in overlap.run(cut, tmp_path / "run", 1, 4, ranks=4, timeout_s=60):
        assert (exact, found) == (False, parts[place])


def test_a_save_is_of_its_step_whatever_training_does_meanwhile(tmp_path, monkeypatch):
    """The copy is taken before the program goes on; here nothing is written before training has gone on and ended."""
    from overlap.state import store

    def late(*args):
        assert gone_on.wait(60)
        write(*args)

    async def main(rank):
        model = MAKES["data"](rank, weights())
        saves = parallel.Checkpoints(rank, tmp_path)
        await steps(rank, model, 2)
        await saves.save(model)
        saved = bits(await model.finish())
        await steps(rank, model, 5)
        assert bits(await model.finish()) != saved
        await rank.barrier()
        assert complete_steps(tmp_path) == []
        await rank.barrier()
        gone_on.set()
        await saves.finish()
        return saved

    gone_on, write = threading.Event(), store.write_file
    monkeypatch.setattr(store, "write_file", late)
    saved = overlap.run(main, ranks=2, timeout_s=60)
    assert training(tmp_path, "data", ranks=2, until=2)[0][1] == saved[0]


def test_state_of_a_hook_that_no_file_can_have_is_told(tmp_path):
    async def counted(bucket):
        bucket.state["seen"] = {bucket.step}  # a set
        return bucket.buffer

    async def main(rank):
        model = parallel.DataParallel(rank, weights(), optimizer=ADAM, hook=counted)
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        if restored := await checkpoints.restore(model):
            return restored.exact, restored.why
        await steps(rank, model, 1)
        await checkpoints.save(model)
        return await checkpoints.finish()

    overlap.run(main, ranks=2)
    [(exact, why)] = set(overlap.run(main, ranks=2))
    assert (exact, why.partition(";")[0]) == (
        False,
        "the state of a hook is not in it: tree['state']['seen']: cannot keep set",
    )


def test_the_newest_two_stay(tmp_path):
    training(tmp_path, "data", ranks=2, save_at=(1, 2, 3), until=3)
    assert complete_steps(tmp_path) == [3, 2]
    assert len(os.listdir(tmp_path)) == 2


def test_a_whole_one_is_a_file_that_the_library_reads(tmp_path):
    found = training(tmp_path, "stage 3", ranks=3, save_at=(1,), until=1, whole=True)[0][2]
    with safe_open(checkpoint(tmp_path, 1) / "model.safetensors", "np") as file:
        assert {name: file.get_tensor(name).tobytes() for name in weights()} == found
        assert "optimizer:mean:w0" in file.keys()  # noqa: SIM118 (it is no dict)
    assert os.listdir(checkpoint(tmp_path, 1)) == ["model.safetensors"]


def test_bfloat16_and_float8_are_kept_bit_by_bit(tmp_path):
    types = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16)
    params = {f"{np.dtype(kind)}": np.arange(-4, 5, dtype=np.float32).astype(kind) for kind in types}

    async def main(rank, params):
        model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1))
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        if not await checkpoints.restore(model):
            model.steps = 1  # as if it had made one
            await save_now(checkpoints, model)
        return bits(await model.finish())

    overlap.run(main, params, ranks=2)
    found = overlap.run(main, {name: np.zeros_like(w) for name, w in params.items()}, ranks=3)
    assert found == [bits(params)] * 3


def test_four_ranks_save_and_three_go_on(tmp_path):
    saved = training(tmp_path, "stage 3", ranks=4, save_at=(2,), until=2)
    assert [begun for _, begun, _ in training(tmp_path, "stage 3", ranks=3, until=2)] == [saved[0][2]] * 3


def test_each_host_may_have_a_folder_of_its_own(tmp_path):
    """Each rank goes on from its own file, and a checkpoint is complete if the files of all ranks are somewhere."""

    async def main(rank, folder, until, make="stage 3"):
        model = MAKES[make](rank, weights(seed=rank.world_size))
        checkpoints = parallel.Checkpoints(rank, tmp_path / folder(rank.rank))
        restored = await checkpoints.restore(model)
        await steps(rank, model, until)
        await save_now(checkpoints, model)
        return restored and (restored.step, restored.exact), bits(await model.finish())

    through = overlap.run(main, lambda rank: "through", 4, ranks=2, timeout_s=60)
    overlap.run(main, lambda rank: f"of {rank}", 2, ranks=2, timeout_s=60)
    assert overlap.run(main, lambda rank: f"of {rank}", 4, ranks=2, timeout_s=60) == [
        ((2, True), found) for _, found in through
    ]
    with pytest.raises(overlap.RankFailedError) as caught:
        overlap.run(main, lambda rank: f"of {rank}", 4, "data", ranks=2, timeout_s=60)
    assert "is on another host; copy it here, or name a folder that all ranks see" in str(caught.value.cause)


def test_a_checkpoint_of_the_version_before_is_refused_by_name(tmp_path):
    folder = tmp_path / "checkpoint-000000000007"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    assert str(error_of(overlap.RankFailedError, training, tmp_path, "data", ranks=2, until=1).cause) == (
        f"checkpoint: {folder} is of an earlier version of overlap, which this one cannot read; go on with that "
        "version, or name another folder"
    )


# -- complete, or not there ------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_write_leaves_the_one_before(tmp_path, monkeypatch):
    training(tmp_path, "data", ranks=2, save_at=(1,), until=1)
    from overlap.state import store

    def fail(path, arrays, about):
        if about.rank == 1:
            raise OSError("no space left")
        write(path, arrays, about)

    write = store.write_file
    monkeypatch.setattr(store, "write_file", fail)
    told = r"^rank 1 failed.*: OSError: checkpoint of step 2 \(saved at [\w/.]+:\d+\) cannot be written: no space left"
    with pytest.raises(overlap.RankFailedError, match=told):
        training(tmp_path, "data", ranks=2, save_at=(2,), until=2)
    assert complete_steps(tmp_path) == [1]
    monkeypatch.undo()
    assert training(tmp_path, "data", ranks=2, save_at=(2,), until=2)[0][0].step == 1
    assert len(os.listdir(tmp_path)) == 2


def test_a_damaged_one_is_passed_over(tmp_path, capsys):
    training(tmp_path, "data", ranks=2, save_at=(1, 2), until=2)
    path = checkpoint(tmp_path, 2) / "rank-1-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [restored.step for restored, _, _ in training(tmp_path, "data", ranks=2, until=2)] == [1, 1]
    told = f"checkpoint of step 2 is passed over: {path} is damaged: its bytes do not match its digest"
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(2, -9), id="before the first"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(3, 45), id="beyond the last"),
        pytest.param(lambda entries, pieces: pieces.update(x=pieces.pop("w0[0:36]")), id="a key that is not there"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__delitem__(3), id="half a piece"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(2, None), id="no numbers"),
        pytest.param(lambda entries, pieces: entries["w0[0:36]"].update(dtype="F99"), id="a type that is none"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(1, [1 << 60]), id="more than memory has"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(1, [-1]), id="less than nothing"),
        pytest.param(lambda entries, pieces: pieces["w0[0:36]"].__setitem__(0, "w9"), id="another name"),
    ],
)
def test_a_header_that_someone_else_has_written_leads_nowhere_else(tmp_path, capsys, change):
    """With a digest that is right: it is passed over, or the model is said to be another one."""
    training(tmp_path, "data", ranks=1, save_at=(1, 2), until=2)
    path = checkpoint(tmp_path, 2) / "rank-0-of-1.safetensors"
    header = SavedFile(path).header
    entries = json.loads(header)
    about = json.loads(entries["__metadata__"]["overlap"])
    change(entries, about["pieces"])
    entries["__metadata__"] = {"xxh3_128": "0" * 32, "overlap": json.dumps(about)}
    text = json.dumps(entries).encode()
    data = len(text).to_bytes(8, "little") + text + path.read_bytes()[8 + len(header) :]
    path.write_bytes(data.replace(b"0" * 32, xxhash.xxh3_128(data).hexdigest().encode(), 1))
    try:
        found = [restored.step for restored, _, _ in training(tmp_path, "data", ranks=1, until=2)]
    except overlap.RankFailedError as failed:
        assert isinstance(failed.cause, overlap.UsageError), failed.cause  # noqa: PT017
        assert "checkpoint" in str(failed.cause)  # noqa: PT017
    else:
        assert found == [1]
        assert "checkpoint of step 2 is passed over: " in capsys.readouterr().err


def test_where_all_are_damaged_nobody_begins_anew(tmp_path):
    training(tmp_path, "data", ranks=2, save_at=(1,), until=1)
    (checkpoint(tmp_path, 1) / "rank-0-of-2.safetensors").write_bytes(b"")
    error = error_of(overlap.RankFailedError, training, tmp_path, "data", ranks=2, until=2)
    assert str(error.cause).startswith(f"checkpoint: none of the 1 in {tmp_path} can be read (")
    assert str(error.cause).endswith("); name another folder")


PROGRAM = """
import os, signal, trio
from tests.parallel.test_checkpoints import MAKES, steps, bits
from tests.parallel.programs import weights
from overlap import parallel
import overlap

async def main(rank):
    model = MAKES["stage 2"](rank, weights())
    checkpoints = parallel.Checkpoints(rank)
    restored = await checkpoints.restore(model)
    begun = model.steps
    for step in range(begun, 4):
        await steps(rank, model, step + 1)
        await checkpoints.save(model)
        if "DIES" in os.environ and step == 2 and not rank.restart and rank.rank == 1:
            await checkpoints.finish()
            os.kill(os.getpid(), signal.SIGKILL)
    await checkpoints.finish()
    found = bits(await model.finish())
    if rank.rank == 0:
        digest = hash(tuple(map(bytes.hex, found.values())))
        print("began at", begun, "exact", restored and restored.exact, "bits", digest)

overlap.run(main)
"""


@pytest.mark.slow
def test_a_world_that_is_killed_goes_on_from_its_last_checkpoint(tmp_path):
    once = launch(tmp_path, PROGRAM, "--processes", "2", "--state-dir", "once", PYTHONHASHSEED="0")
    options = ("--processes", "2", "--state-dir", "again", "--max-restarts", "1")
    again = launch(tmp_path, PROGRAM, *options, PYTHONHASHSEED="0", DIES="yes")
    assert once.returncode == again.returncode == 0, once.stderr + again.stderr
    assert "began at 0" in once.stdout
    assert "began at 3 exact True" in again.stdout
    assert once.stdout.split("bits")[1] == again.stdout.split("bits")[1]
    assert "restart 1 of 1, from step 3" in again.stderr


# -- what is refused -------------------------------------------------------------------------------------------------


def refused(folder, params, **options):
    async def main(rank):
        model = parallel.DataParallel(rank, params, optimizer=parallel.SGD(0.1), **options)
        return str(await error_from(overlap.UsageError, parallel.Checkpoints(rank, folder).restore(model)))

    [told] = set(overlap.run(main, ranks=2, timeout_s=60))
    return told


def test_the_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path):
    async def main(rank):
        model = parallel.DataParallel(rank, {"a": np.ones((2, 3)), "b": np.ones(2)}, optimizer=parallel.SGD(0.1))
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        await save_now(checkpoints, model)

    overlap.run(main, ranks=2)
    of = f"model: {checkpoint(tmp_path, 0)} is of another model:"
    a, b = np.ones((2, 3)), np.ones(2)
    for params, told in (
        ({"a": a, "b": b, "c": b}, "it has no 'c'"),
        ({"a": a}, "it has 'b', which this one has not"),
        ({"a": a, "b": b.astype(np.float32)}, "'b' is float64 (2,) there and float32 (2,) here"),
    ):
        advice = "restore the model that was saved, or name another folder"
        assert refused(tmp_path, params) == f"{of} {told}; {advice}"


def test_a_model_that_has_made_steps_is_not_restored(tmp_path):
    async def main(rank):
        model = MAKES["data"](rank, weights())
        await steps(rank, model, 2)
        error = await error_from(overlap.UsageError, parallel.Checkpoints(rank, tmp_path).restore(model))
        assert str(error) == "model: it has made 2 steps; restore one that has made none"

    overlap.run(main, ranks=1)


def test_somebody_must_say_where():
    async def main(rank):
        error = error_of(overlap.UsageError, parallel.Checkpoints, rank)
        assert str(error) == "folder: no folder for checkpoints is known; pass one, or give --state-dir DIR"
        error = error_of(overlap.UsageError, parallel.Checkpoints, rank, "somewhere", keep=0)
        assert str(error) == "keep: expected a whole number from 1, got 0"

    overlap.run(main, ranks=1)


def test_a_type_that_the_library_does_not_know_is_named(tmp_path):
    async def main(rank):
        model = parallel.DataParallel(rank, {"w": np.ones(2, np.complex128)}, optimizer=parallel.SGD(0.1))
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        error = await error_from(overlap.UsageError, checkpoints.save(model))
        assert str(error) == "model: safetensors has no type for complex128; convert them first"

    overlap.run(main, ranks=1)
    assert complete_steps(tmp_path) == []


def test_nothing_is_written_in_virtual_time(tmp_path):
    async def main(rank):
        model = MAKES["data"](rank, weights())
        checkpoints = parallel.Checkpoints(rank, tmp_path)
        assert await checkpoints.restore(model) is None
        await save_now(checkpoints, model)

    overlap.run(main, ranks=2, clock="virtual")
    assert os.listdir(tmp_path) == []


# -- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 30])
def test_every_element_is_in_one_share(ranks):
    sizes = [5, 0, 1, 12]
    kinds = [np.float32, np.float64, np.int8, np.float16]
    arrays = [np.arange(size, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    pieces = [Shard.of_whole_tensor(str(i), array.shape, array) for i, array in enumerate(arrays)]
    shares = [pieces_of_rank(pieces, rank, ranks) for rank in range(ranks)]
    for i, size in enumerate(sizes):
        mine = [part for share in shares for part in share if part.tensor == str(i)]
        assert [at for part in mine for at in range(part.start, part.stop)] == list(range(size))
        assert [value for part in mine for value in part.data] == list(range(size))
    nbytes = [sum(part.data.nbytes for part in share) for share in shares]
    assert max(nbytes) - min(nbytes) <= 2 * 8 or ranks == 1


def test_a_file_tells_all(tmp_path):
    training(tmp_path, "data", ranks=2, save_at=(1,), until=1)
    file = SavedFile(checkpoint(tmp_path, 1) / "rank-1-of-2.safetensors")
    about = file.facts
    assert (about.step, about.rank, about.ranks, about.extra) == (1, 1, 2, {"at": 1})
    assert {piece.key for piece in about.pieces.values()} >= {"w0", "optimizer:mean:w0"}
    assert file.dtype_name(next(iter(about.pieces))) == "float64"
