"""Models from files: those that come with the package, one's own as TOML, and config.json of Hugging Face."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .model import Model

# Names in transformers' configurations (PretrainedConfig of llama, mixtral, deepseek_v3, gpt2).
_HUGGING_FACE: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length"),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "shared_experts": ("n_shared_experts",),
    "expert_ffn": ("moe_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
    "mtp_layers": ("num_nextn_predict_layers",),
}
_GATED = ("silu", "swiglu", "gelu_gated")  # activations of perceptrons with three matrices
# Defaults of the classes of transformers: their perceptrons, and whether scores use the
# matrix of the embedding.
_ALWAYS_GATED = ("gemma", "gemma2", "gemma3_text")
_NEVER_GATED = ("phi3small", "starcoder2", "nemotron")
_BIDIRECTIONAL = ("bert", "roberta")
_TIED = ("gpt2", "gpt_bigcode", "opt", "bloom", "falcon", "bert", "roberta", *_ALWAYS_GATED)


@cache
def known() -> tuple[str, ...]:
    """Return the names of the models that come with the package."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in _data().iterdir() if path.name.endswith(".toml")))


def load(name: str | None, changes: Mapping[str, int] | None = None) -> Model:
    """Read a model.

    Args:
        name: One of `known()`, or a file: TOML with the attributes of `Model` as keys, or a config.json of Hugging
            Face's. None: all is in `changes`.
        changes: Figures that are to be others.

    Raises:
        UsageError: If there is no such model or file, or a figure is missing or cannot be meant; names file and key.
    """
    read, where = _read(name) if name is not None else ({"name": "own"}, "--model: own figures")
    told: dict[str, Any] = {**read, **(changes or {})}
    allowed = {field.name: field for field in fields(Model)}
    if unknown := sorted(set(told) - set(allowed)):
        raise UsageError(f"{where}: {unknown[0]} is no figure of a model; known are {', '.join(allowed)}")
    needed = [key for key, field in allowed.items() if field.default is MISSING and key not in told]
    if needed:
        raise UsageError(f"{where}: expected {', '.join(needed)} too")
    for key, field in allowed.items():
        kind = {"str": str, "bool": bool, "int": int}[str(field.type)]
        if key in told and type(told[key]) is not kind:
            expected = {str: "a text", bool: "true or false", int: "a whole number"}[kind]
            raise UsageError(f"{where}: {key}: expected {expected}, got {told[key]!r}")
    try:
        return Model(**told)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _read(name: str) -> tuple[dict[str, object], str]:
    if name in known():
        return tomllib.loads((_data() / f"{name}.toml").read_text(encoding="utf-8")), name
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise UsageError(
            f"--model: {name!r} is unknown; known are {', '.join(known())}, or a file .toml or config.json"
        )
    try:
        text = path.read_text(encoding="utf-8")
        told = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"--model: {name}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--model: {name}: not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(told, dict):
        raise UsageError(f"--model: {name}: expected an object with figures, got {type(told).__name__}")
    if path.suffix == ".json":
        told = _from_hugging_face(told, name)
    return {"name": path.stem, **told}, name


def _from_hugging_face(told: Mapping[str, object], where: str) -> dict[str, object]:
    found: dict[str, object] = {"source": "config.json"}
    inner = told.get("text_config")
    if isinstance(inner, Mapping):  # of a model that sees and hears too
        told = {**told, **inner}
    for key, names in _HUGGING_FACE.items():
        for name in names:
            if told.get(name) is not None:
                found[key] = told[name]
    kind = told.get("model_type")
    gated = told.get("hidden_act", told.get("activation_function")) in _GATED or kind in _ALWAYS_GATED
    found["gated"] = gated and kind not in _NEVER_GATED
    found.setdefault("tied", kind in _TIED)
    found["causal"] = kind not in _BIDIRECTIONAL
    if told.get("sliding_window") is not None and told.get("use_sliding_window") is not False and found["causal"]:
        found["window"] = told["sliding_window"]
    width = found.get("hidden")
    if "ffn" not in found and kind in ("gpt2", "gpt_bigcode", "bloom", "falcon") and isinstance(width, int):
        found["ffn"] = 4 * width  # where they say nothing
    if told.get("multi_query") is True and not told.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    return {**found, **_shared(told, found, where)}


def _shared(told: Mapping[str, object], found: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the experts that all tokens meet, where their width is told, and refuse what a `Model` cannot say."""
    width, each = told.get("shared_expert_intermediate_size"), found.get("expert_ffn")
    for name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
        if told.get(name) not in (None, 1):
            raise UsageError(f"{where}: {name}: expected 1, experts in all layers but the first, got {told[name]!r}")
    if told.get("mlp_only_layers"):
        raise UsageError(f"{where}: mlp_only_layers: expected none, got {told['mlp_only_layers']!r}")
    if told.get("model_type") in ("llama4", "llama4_text"):
        return {"shared_experts": 1}
    if not isinstance(width, int) or not isinstance(each, int) or not width or not each:
        return {}
    if width % each:
        raise UsageError(
            f"{where}: shared_expert_intermediate_size: expected a multiple of moe_intermediate_size ({each}), "
            f"got {width}"
        )
    return {"shared_experts": width // each}


def _data() -> Path:
    return Path(str(files(__package__))) / "models"
