"""Models from data, files and figures: what they add up to, and what is refused."""

import json
from dataclasses import replace

import pytest

from overlap import UsageError
from overlap.planning import Layout, load, memory_of
from overlap.planning.amounts import Amounts

# Published totals, in units of 1e9: facts that the files of models do not hold.
TOTALS = {
    "llama-8b": (8.03, 8.03),
    "llama-70b": (70.55, 70.55),
    "llama-405b": (405.8, 405.8),
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v3": (671.0, 37.6),
    "gpt3-175b": (174.6, 174.6),
    "bert-5b": (5.03, 5.03),
    "llama2-7b": (6.74, 6.74),
    "llama2-70b": (68.98, 68.98),
    "mpt-7b": (6.65, 6.65),
    "mpt-13b": (12.85, 12.85),
    "mpt-70b": (64.9, 64.9),
    "mtnlg-530b": (530.0, 530.0),
}


@pytest.mark.parametrize("name", TOTALS)
def test_a_model_has_as_many_parameters_as_was_published(name):
    model, (total, active) = load(name), TOTALS[name]
    assert model.parameters == pytest.approx(total * 1e9, rel=2e-3)
    assert model.active_parameters == pytest.approx(active * 1e9, rel=5e-3)
    assert model.source


def test_operations_of_a_sample_are_six_for_each_parameter_and_token_and_those_of_attention():
    model = load("gpt3-175b")
    expected = 6 * model.sequence * (model.parameters + model.layers * 2 * model.sequence * model.hidden)
    assert model.sample_flops == expected


def test_a_file_of_hugging_face_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
                "hidden_act": "silu", "tie_word_embeddings": False, "model_type": "llama",
            }
        )
    )  # fmt: skip
    assert load(str(path)).parameters == load("llama-8b").parameters


OF_QWEN2_MOE = {
    "model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 2560, "num_attention_heads": 28, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "shared_expert_intermediate_size": 20480, "tie_word_embeddings": False, "vocab_size": 151936,
    "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),  # as published; norms and positions, which are left out here, are below the last digit
    [
        ({"model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 768, "n_head": 12, "n_layer": 12,
          "n_positions": 1024, "vocab_size": 50257}, 0.12444 - 0.00079),
        ({"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 3072,
          "intermediate_size": 24576, "max_position_embeddings": 8192, "num_attention_heads": 16,
          "num_hidden_layers": 28, "num_key_value_heads": 16, "vocab_size": 256000}, 8.54),
        ({"model_type": "opt", "activation_function": "relu", "ffn_dim": 16384, "hidden_size": 4096,
          "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50272},
         6.65),
        (OF_QWEN2_MOE, 57.41),
        ({"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "hidden_act": "silu", "head_dim": 128, "hidden_size": 5120,
            "intermediate_size": 8192, "interleave_moe_layer_step": 1, "max_position_embeddings": 8192,
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 16, "vocab_size": 202048}}, 107.77),
    ],
    ids=lambda of: of["model_type"] if isinstance(of, dict) else None,
)  # fmt: skip
def test_what_a_configuration_leaves_to_its_class_is_known(config, billions, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert load(str(path)).parameters / 1e9 == pytest.approx(billions, rel=3e-3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: expected 1, experts in all layers but the first, got 2"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers: expected none, got [3]"),
        (
            {"shared_expert_intermediate_size": 2561},
            "shared_expert_intermediate_size: expected a multiple of moe_intermediate_size (2560), got 2561",
        ),
    ],
)
def test_a_configuration_whose_experts_cannot_be_said_is_refused(change, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**OF_QWEN2_MOE, **change}))
    with pytest.raises(UsageError) as refused:
        load("config.json")
    assert str(refused.value) == f"config.json: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers = 2", "own.toml: expected hidden, heads, ffn, vocabulary, sequence too"),
        ("depth = 2", "own.toml: depth is no figure of a model; known are name, layers, hidden, heads, ffn"),
        ("layers = '2'", "own.toml: layers: expected a whole number, got '2'"),
        ("layers = -2", "own.toml: layers: expected a whole number from 1, got -2"),
        ("heads = 3", "own.toml: heads: expected a divisor of hidden (64), or a head_dim beside it; got 3"),
        ("experts = 4", "own.toml: top_k: expected 1 to experts (4), got 0"),
        ("layers =", "own.toml: not TOML: "),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_figure(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocabulary": 100, "sequence": 32}
    key = text.split(" ")[0]
    whole = text if "expected hidden" in expected else "\n".join(f"{k} = {v}" for k, v in good.items() if k != key)
    (tmp_path / "own.toml").write_text(whole if whole == text else f"{whole}\n{text}\n")
    with pytest.raises(UsageError) as refused:
        load("own.toml")
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"tp": 0}, "tp: expected a whole number from 1, got 0"),
        ({"dp": 4, "ep": 3}, "ep: expected a divisor of dp (4), got 3"),
        ({"dp": 4, "global_batch": 6}, "global_batch: expected a multiple of dp x micro_batch (4 x 1), got 6"),
        ({"zero": 4}, "zero: expected 0, 1, 2 or 3, got 4"),
        ({"chunks": 2}, "chunks: expected 1 for 1f1b, got 2"),
        ({"order": "tp"}, "order: expected pp.dp.tp, dp.pp.tp, pp.tp.dp, dp.tp.pp, tp.pp.dp, tp.dp.pp, got 'tp'"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_refused(figures, expected):
    with pytest.raises(UsageError) as refused:
        Layout(**{"global_batch": figures.get("dp", 1), **figures})
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"tp": 5}, "tp: expected a divisor of heads (64) of llama-70b, got 5"),
        ({"pp": 81}, "pp: expected at most the layers of llama-70b (80), got 81 stages"),
        ({"dp": 2, "ep": 2}, "ep: llama-70b has no experts; expected 1, got 2"),
        ({"cp": 3}, "cp: expected a divisor of sequence (8192) of llama-70b, got 3"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(figures, expected):
    model = load("llama-70b")
    with pytest.raises(UsageError) as refused:
        Layout(**{"global_batch": figures.get("dp", 1), **figures}).check(model)
    assert str(refused.value) == expected


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_every_layer_and_parameter_is_on_one_stage(pp):
    model, layout = load("llama-70b"), Layout(tp=8, pp=pp)
    amounts = Amounts(model=model, layout=layout)
    layers = [layer for stage in range(pp) for layer in layout.layers_of(model, stage)]
    assert layers == list(range(model.layers))
    held = sum(map(amounts.dense_parameters, layers)) + sum(map(amounts.table_parameters, range(pp)))
    assert held * layout.tp == model.parameters


# arXiv 1910.02054, figure 1: 7.5e9 parameters on 64 ranks, in GB; ours hold what is under way besides.
@pytest.mark.parametrize(("zero", "gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_take_what_the_paper_on_zero_says(zero, gb):
    model = replace(load("llama-8b"), layers=30, vocabulary=64128)
    memory = memory_of(model, Layout(dp=64, global_batch=64, zero=zero, bucket_bytes=1))
    whole = (
        4 * 2 * model.layer_parameters(0) if zero == 3 else 2 if zero == 2 else 0
    )  # two layers, or numbers, in whole
    states = memory.weights + memory.gradients + memory.optimizer - whole
    assert states / model.parameters * 7.5 == pytest.approx(gb, abs=0.06)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_of_hsdp_are_those_of_one_of_its_groups(zero):
    model = load("llama-8b")
    two, one = (
        memory_of(model, Layout(dp=dp, global_batch=128, micro_batch=1, zero=zero, replicate=copies))
        for dp, copies in ((128, 2), (64, 1))
    )
    states = [(each.weights, each.gradients, each.optimizer) for each in (two, one)]
    assert states[0] == states[1]


def test_activations_take_what_the_paper_on_checkpointing_says():
    # arXiv 2205.05198, table 2, of whose 34 sbh two are masks of dropout
    model = load("gpt3-175b")
    sbh = model.sequence * model.hidden
    scores = 8 * model.sequence * model.vocabulary
    # Fused attention saves no scores, as if these were computed again.
    whole = memory_of(model, Layout(pp=96, checkpointing="none", sequence_parallel=False))
    cut = memory_of(model, Layout(tp=8, pp=96, checkpointing="none"))
    assert whole.activations - (scores if whole.stage == 95 else 0) == 32 * sbh
    assert cut.activations - (scores / 8 if cut.stage == 95 else 0) == 32 * sbh / 8


def test_an_operation_that_is_computed_again_saves_its_result():
    model = replace(load("llama-8b"), layers=2)

    def activations(checkpointing):
        return memory_of(model, Layout(checkpointing=checkpointing)).activations

    # Of two layers, one saves it; the other one is in its turn and has everything.
    tokens, whole = model.sequence, activations("none")
    assert whole - activations("norm") == tokens * 2 * model.hidden * 2
    assert whole - activations("attention") == tokens * model.value_width * 2
    assert whole - activations("activation") == tokens * model.ffn * 2
    halves = model.hidden + model.query_width + model.kv_width + 2 * model.ffn
    assert whole - activations("products") == tokens * halves / 2 * 2
    every = [whole - activations(name) for name in ("norm", "activation", "products")]
    assert whole - activations("selective") == sum(every)


@pytest.mark.parametrize("value", ["norms", "", "norm+", "full+norm"])
def test_an_unknown_operation_cannot_be_computed_again(value):
    with pytest.raises(UsageError) as refused:
        Layout(checkpointing=value)
    assert str(refused.value) == (
        "checkpointing: expected none, selective, full, or some of attention, norm, activation, products joined by +, "
        f"got {value!r}"
    )


def test_a_token_meets_half_of_the_sequence_or_its_window():
    model = load("llama-8b")
    assert model.attended_tokens == 4096
    assert replace(model, causal=False).attended_tokens == 8192
    # 1,024 tokens meet 1 to 1,024, the others 1,024 each
    assert replace(model, window=1024).attended_tokens == (1024 * 512 + 7168 * 1024) / 8192
    assert replace(model, window=100_000).attended_tokens == 4096
    with pytest.raises(UsageError, match="window: expected a causal model, got 8 with causal = false"):
        replace(model, causal=False, window=8)


def test_products_in_eight_bits_carry_sixteen():
    layout = Layout(dtype="float8_e4m3")
    wide, narrow = (Amounts(model=load("llama-8b"), layout=each) for each in (Layout(), layout))
    assert (layout.storage_dtype, narrow.itemsize) == ("bfloat16", 2)
    assert narrow.projections() == wide.projections()
    assert memory_of(load("llama-8b"), layout).weights == memory_of(load("llama-8b"), Layout()).weights


def test_layers_that_predict_further_tokens_are_on_the_last_stage_and_have_scores():
    model = load("deepseek-v3")
    further = replace(model, mtp_layers=1)
    layout = Layout(pp=16)
    assert [len(layout.layers_of(further, stage)) - len(layout.layers_of(model, stage)) for stage in (0, 15)] == [0, 1]
    one, two = (Amounts(model=each, layout=layout).vocabulary_scores() for each in (model, further))
    assert two.flops == 2 * one.flops
    assert further.parameters - model.parameters == model.layer_parameters(60)
