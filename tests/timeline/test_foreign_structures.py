"""Files of other tools with any structure: read, or refused with a usage error; no other error ever."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import overlap
from overlap.errors import UsageError
from overlap.timeline import breakdowns, read_trace

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from([10**30, -(10**30), 2**63, 1e308, -0.5, float("inf"), float("nan"), "", "0", "x", "3"])
    | st.text(max_size=4)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def field(*sensible):
    """Return values of which most make sense."""
    return st.sampled_from(sensible) | st.sampled_from(sensible) | ANYTHING


def entry(**fields):
    """Return objects that have some of these fields."""
    return st.fixed_dictionaries({}, optional=fields) | st.fixed_dictionaries(fields)


EVENTS = st.lists(
    entry(
        ph=field("X", "B", "E"),
        cat=field("kernel", "cpu_op", "user_annotation", "collective", "collective_comm"),
        name=field("gemm", "ncclDevKernel_AllReduce", "gloo:all_reduce", "ProfilerStep#3", "c10d::x"),
        ts=field(0, 5, 2.5), dur=field(1, 7, 0, -1), pid=field(0, 1), tid=field(0, 1, "a"),
        args=field({}, {"Collective name": "allreduce"}) | entry(**{
            "Collective name": field("allreduce"), "In msg nelems": field(4), "Out msg nelems": field(4),
            "Seq": field(1), "dtype": field("float"), "Process Group Ranks": field("[0, 1]", [0, 1]),
            "Process Group Name": field("0"), "Input Dims": field([[2, 2]]), "Input type": field(["float"]),
        }),
    ) | ANYTHING,
    max_size=4,
)  # fmt: skip
PROFILES = st.fixed_dictionaries(
    {"traceEvents": EVENTS},
    optional={
        "schemaVersion": field(1), "baseTimeNanoseconds": field(1_700_000_000_000_000_000),
        "distributedInfo": entry(rank=field(0, 1), world_size=field(2)) | ANYTHING,
    },
)  # fmt: skip
NEURON = st.fixed_dictionaries({
    "trace_events": st.lists(
        entry(
            name=field("nc_exec_running", "cc_running"), timestamp=field(3, 9), duration=field(1, 4, -1),
            worker_gid=field(0, 1, "1"), nc_idx=field(0), lnc_idx=field(0),
        ) | ANYTHING,
        max_size=4,
    )
})  # fmt: skip
OURS = st.fixed_dictionaries({
    "overlap": ANYTHING | entry(
        version=field(1), world_size=field(2), clock=field("real"), dropped=field(0), meta=field({})
    ),
    "traceEvents": EVENTS,
})  # fmt: skip
DOCUMENTS = {"of a profiler": PROFILES, "of Neuron": NEURON, "ours": OURS, "any": ANYTHING}


def shown(path):
    timeline = read_trace(path)
    breakdowns(timeline)
    overlap.why(timeline)


def refused(read, path):
    """Whether a document is refused by a sentence; any other error ends the test."""
    try:
        read(path)
    except UsageError:
        return True
    return False


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_trace_is_read_or_refused(kind, tmp_path):
    path = tmp_path / "t.json"

    @given(DOCUMENTS[kind])
    @example({"traceEvents": [{"pid": {}, "ph": "X", "ts": 1, "dur": 2, "name": "x", "cat": "kernel"}]})
    def read(document):
        path.write_text(json.dumps(document))
        ways.add(refused(shown, path))

    ways = set()
    read()
    assert True in ways
