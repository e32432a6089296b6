"""Files of other tools with any structure: read, or refused with a usage error; no other error ever."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overlap.errors import UsageError
from overlap.planning import benchmark_logs, configurations
from overlap.timeline import breakdowns, read_trace, verdict_of

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
    verdict_of(timeline)


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


ROWS = st.fixed_dictionaries({
    "rows": st.lists(
        entry(
            operation=field("all_reduce", "broadcast"), size_bytes=field(8), dtype=field("float32"), ranks=field(2),
            median_ns=field(900), wrong=field(0),
        ) | ANYTHING,
        max_size=3,
    ) | ANYTHING
})  # fmt: skip


def test_rows_of_a_benchmark_are_read_or_refused(tmp_path):
    path = tmp_path / "b.json"

    @given(ROWS)
    def read(document):
        path.write_text(json.dumps(document))
        ways.add(refused(lambda path: benchmark_logs.read(str(path)), path))

    ways = set()
    read()
    assert ways == {True, False}


def test_a_dtype_that_is_no_name_is_refused(tmp_path):
    path = tmp_path / "b.json"
    row = {"operation": "all_reduce", "size_bytes": 8, "ranks": 2, "median_ns": 900, "wrong": 0}
    path.write_text(json.dumps({"rows": [{**row, "dtype": {"": None, "0": None}}]}))
    with pytest.raises(UsageError, match="row 0: expected a dtype such as float or bfloat16, found"):
        benchmark_logs.read(str(path))


FIGURES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "head_dim",
    "max_position_embeddings", "num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size", "tie_word_embeddings", "hidden_act", "model_type", "n_embd", "multi_query",
    "mlp_only_layers", "decoder_sparse_step", "kv_lora_rank", "q_lora_rank",
)  # fmt: skip


def test_a_configuration_is_read_or_refused(tmp_path):
    path = tmp_path / "config.json"
    figures = entry(**{name: field(1, 2, 8, 64, "llama", "silu") for name in FIGURES})

    @given(figures | st.fixed_dictionaries({"text_config": figures | ANYTHING}) | ANYTHING)
    def read(document):
        path.write_text(json.dumps(document))
        ways.add(refused(lambda path: configurations.load(str(path)), path))

    ways = set()
    read()
    assert True in ways
