"""A tree of arrays in a file, and saves that are killed: what comes back is whole, or said to be damaged."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from overlap import UsageError
from overlap.state.files import CODES, DamagedError, FileFacts, SavedFile, write_file
from overlap.state.rank_state import read_tree
from overlap.state.trees import pack_tree
from tests.errors import error_of

# -- A tree of arrays in a file: what comes back is what was kept, bit by bit, or it is said to be damaged -------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
arrays = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape)).astype(dtype).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([np.float32, np.int8, np.bool_, np.complex128, ">f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]),
)
trees = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def write(path: Path, tree: object) -> None:
    arrays, form = pack_tree(tree, CODES)
    write_file(path, arrays, FileFacts(step=1, nonce=2, rank=0, ranks=1, form=form))


def kept(tree: object) -> object:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "save" / "rank-0-of-1.safetensors"
        write(path, tree)
        return read_tree(path)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@given(trees)
def test_what_is_kept_comes_back(tree):
    assert same(tree, kept(tree))


def test_scalars_of_numpy_and_strided_arrays_come_back():
    tree = {"scale": np.float32(1.5), "strided": np.arange(12.0).reshape(3, 4)[:, ::2]}
    back = kept(tree)
    assert type(back["scale"]) is np.float32
    assert back["scale"] == 1.5
    np.testing.assert_array_equal(back["strided"], tree["strided"])


def test_what_comes_back_may_be_written_to():
    back = kept([np.zeros(3)])
    back[0] += 1
    assert back[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2}]}, "tree['a'][1]: cannot keep set; "),
        ({"a": np.array(["x"])}, "tree['a']: cannot keep ndarray; "),
        (object(), "tree: cannot keep object; "),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(tree, message):
    error = error_of(UsageError, kept, tree)
    advice = "expected arrays, numbers, texts or None, in lists, tuples and dicts"
    assert str(error) == message + advice


def test_a_key_that_cannot_be_kept_is_named():
    error = error_of(UsageError, kept, {"a": {(1, 2): 3}})
    assert str(error) == "tree['a']: expected texts or integers as keys, got (1, 2)"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "save" / "rank-0-of-1.safetensors"
    write(path, {"a": np.arange(5), "b": np.ones(1, complex)})
    return path


@given(data=st.data())
def test_any_change_of_a_byte_is_noticed(file, data):
    whole = bytearray(file.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    changed = file.with_name("changed")
    changed.write_bytes(whole)
    with pytest.raises(DamagedError):
        read_tree(changed)


@given(length=st.integers(0, 1000))
def test_any_cut_is_noticed(file, length):
    whole = file.read_bytes()
    if length < len(whole):
        cut = file.with_name("cut")
        cut.write_bytes(whole[:length])
        with pytest.raises(DamagedError):
            read_tree(cut)


def test_other_programs_read_a_file(file):
    with safe_open(file, "np") as opened:
        assert opened.get_tensor("0").tolist() == [0, 1, 2, 3, 4]
        assert (opened.get_slice("1").get_dtype(), opened.get_slice("1").get_shape()) == ("U8", [1, 16])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda entry, about: entry.update(dtype="F99"), id="a type that is none"),
        pytest.param(lambda entry, about: entry.update(shape=[6]), id="more than its bytes"),
        pytest.param(lambda entry, about: entry.update(data_offsets=[-8, 32]), id="before the first"),
        pytest.param(lambda entry, about: entry.pop("shape"), id="half an entry"),
        pytest.param(lambda entry, about: about.pop("step"), id="no step"),
        pytest.param(lambda entry, about: about.update(pieces={"x": ["w", [5], 0, 5]}), id="no such array"),
        pytest.param(lambda entry, about: about.update(pieces={"0": ["w", [5], 1, 6]}), id="beyond the last"),
        pytest.param(lambda entry, about: about.update(pieces={"0": ["w", [5], 0]}), id="half a piece"),
        pytest.param(lambda entry, about: about.update(extra=3), id="values that are none"),
    ],
)
def test_a_header_that_cannot_be_is_refused(file, change):
    header = json.loads(SavedFile(file).header)
    about = json.loads(header["__metadata__"]["overlap"])
    change(header["0"], about)
    header["__metadata__"]["overlap"] = json.dumps(about)
    with pytest.raises(DamagedError, match="is damaged: its header is invalid"):
        SavedFile(file, json.dumps(header).encode())


# ----------------------------------------------------------------------------------------------------------------------
# A save that is killed: at each of its touches of the file system, and at random moments. What is found is whole

ROOT = Path(__file__).parents[2]

PROGRAM = """
import itertools, os, random, shutil, signal, sys, time
import numpy as np
import overlap
from overlap import parallel

FOLDER = os.environ["OVERLAP_STATE_DIR"]

KIND, MOMENTS = sys.argv[1], int(sys.argv[2])
SIZE = 1000 if not MOMENTS else 1 << 20

async def save(rank, checkpoints, step):
    if KIND == "state":
        return await rank.state.save(step, [np.full(SIZE, 10 * step + rank.rank)])
    model = parallel.DataParallel(rank, {"w": np.full(SIZE, 10.0 * step)}, optimizer=parallel.SGD(0.1))
    model.steps = step  # as if it had made them
    await checkpoints.save(model)
    await checkpoints.finish()

async def restore(rank, checkpoints):
    if KIND == "state":
        state = await rank.state.latest()
        assert state is None or set(state.tree[0].tolist()) == {10 * state.step + rank.rank}
        return state and state.step
    model = parallel.DataParallel(rank, {"w": np.zeros(SIZE)}, optimizer=parallel.SGD(0.1))
    restored = await checkpoints.restore(model)
    assert set((await model.finish())["w"].tolist()) == {10.0 * model.steps}
    return restored and restored.step

def make(rank):
    return parallel.Checkpoints(rank, whole=KIND == "whole")

async def saves(rank):
    checkpoints = make(rank)
    await restore(rank, checkpoints)
    for step in (2, 3):
        await save(rank, checkpoints, step)

async def first(rank):
    await save(rank, make(rank), 1)

async def latest(rank):
    return await restore(rank, make(rank))

def die_at(touch):
    touches = itertools.count(1)
    def look(event, arguments):
        if any(FOLDER in str(argument) for argument in arguments) and next(touches) == touch:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(look)

def forked(work, after_s=None):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]

began = time.monotonic()
forked(lambda: [overlap.run(first, ranks=2), overlap.run(saves, ranks=2)])
took_s = time.monotonic() - began
for folder in os.listdir(FOLDER):
    shutil.rmtree(f"{FOLDER}/{folder}")
for touch in range(1, MOMENTS + 1) if MOMENTS else itertools.count(1):
    assert forked(lambda: overlap.run(first, ranks=2)) == 0
    def killed():
        if not MOMENTS:
            die_at(touch)
        overlap.run(saves, ranks=2)
    ended = forked(killed, random.Random(touch).uniform(0, took_s) if MOMENTS else None)
    steps = overlap.run(latest, ranks=2)
    print(touch, ended, *steps, flush=True)
    for folder in os.listdir(FOLDER):
        shutil.rmtree(f"{FOLDER}/{folder}")
    if ended == 0 and not MOMENTS:
        break
"""


def run(tmp_path, kind, moments=0):
    """Return for each kill its number, how the process ended, and the step that each of two ranks finds then."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(moments)], capture_output=True, text=True, check=False, timeout=240,
        env={"PYTHONPATH": str(ROOT), "OVERLAP_STATE_DIR": str(tmp_path / "state"),
             "OVERLAP_FLIGHT_DIR": str(tmp_path / "records")},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert all(row[2] == row[3] for row in rows)  # the same on both ranks
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "checkpoints", "whole"])
def test_a_save_that_is_killed_anywhere_leaves_it_or_the_one_before(tmp_path, kind):
    rows = run(tmp_path, kind)
    assert [row[1] for row in rows] == [9] * (len(rows) - 1) + [0]
    steps = [row[2] for row in rows]
    assert (steps[0], steps[-1], set(steps)) == (1, 3, {1, 2, 3})
    assert len(rows) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "checkpoints"])
def test_a_save_that_is_killed_at_any_moment_leaves_it_or_the_one_before(tmp_path, kind):
    rows = run(tmp_path, kind, moments=50)
    assert len(rows) == 50
    assert {row[2] for row in rows} <= {1, 2, 3}
    assert any(row[1] == 9 for row in rows)
