"""Models from files: models of the package, TOML of users, and config.json of Hugging Face."""

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
_HUGGING_FACE_NAMES: Mapping[str, tuple[str, ...]] = {
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
    return tuple(
        sorted(path.name.removesuffix(".toml") for path in _models_folder().iterdir() if path.name.endswith(".toml"))
    )


def load(name: str | None, changes: Mapping[str, int] | None = None) -> Model:
    """Return the model of a name or file.

    Args:
        name: One of `known()`, or a file: TOML with the attributes of `Model` as keys, or a config.json of Hugging
            Face's. None: all is in `changes`.
        changes: Figures that are to be others.

    Raises:
        UsageError: If there is no such model or file, or a figure is missing or cannot be meant; names file and key.
    """
    read, where = _read_figures(name) if name is not None else ({"name": "own"}, "--model: own figures")
    figures: dict[str, Any] = {**read, **(changes or {})}
    allowed = {field.name: field for field in fields(Model)}
    if unknown := sorted(set(figures) - set(allowed)):
        raise UsageError(f"{where}: {unknown[0]} is no figure of a model; known are {', '.join(allowed)}")
    needed = [key for key, field in allowed.items() if field.default is MISSING and key not in figures]
    if needed:
        raise UsageError(f"{where}: expected {', '.join(needed)} too")
    for key, field in allowed.items():
        kind = {"str": str, "bool": bool, "int": int}[str(field.type)]
        if key in figures and type(figures[key]) is not kind:
            expected = {str: "a text", bool: "true or false", int: "a whole number"}[kind]
            raise UsageError(f"{where}: {key}: expected {expected}, got {figures[key]!r}")
    try:
        return Model(**figures)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _read_figures(name: str) -> tuple[dict[str, object], str]:
    """Return the figures of a model of the package or of a file, and the name for messages."""
    if name in known():
        return tomllib.loads((_models_folder() / f"{name}.toml").read_text(encoding="utf-8")), name
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise UsageError(
            f"--model: {name!r} is unknown; known are {', '.join(known())}, or a file .toml or config.json"
        )
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(f"--model: {name}: {error.strerror}; name a file that can be read") from None
    except ValueError as error:
        raise UsageError(f"--model: {name}: not {path.suffix[1:].upper()}: {error}; correct the file") from None
    if not isinstance(content, dict):
        raise UsageError(f"--model: {name}: expected an object with figures, got {type(content).__name__}")
    if path.suffix == ".json":
        content = _convert_hugging_face(content, name)
    return {"name": path.stem, **content}, name


def _convert_hugging_face(config: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the figures of `Model` from a config.json of Hugging Face, with the defaults of its classes."""
    figures: dict[str, object] = {"source": "config.json"}
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # the language part of a model of several media
        config = {**config, **inner}
    for key, names in _HUGGING_FACE_NAMES.items():
        for name in names:
            if config.get(name) is not None:
                figures[key] = config[name]
    kind = config.get("model_type")
    gated = config.get("hidden_act", config.get("activation_function")) in _GATED or kind in _ALWAYS_GATED
    figures["gated"] = gated and kind not in _NEVER_GATED
    figures.setdefault("tied", kind in _TIED)
    figures["causal"] = kind not in _BIDIRECTIONAL
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False and figures["causal"]:
        figures["window"] = config["sliding_window"]
    width = figures.get("hidden")
    if "ffn" not in figures and kind in ("gpt2", "gpt_bigcode", "bloom", "falcon") and isinstance(width, int):
        figures["ffn"] = 4 * width  # the default of these classes
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        figures["kv_heads"] = 1
    return {**figures, **_shared_expert_figures(config, figures, where)}


def _shared_expert_figures(
    config: Mapping[str, object], figures: Mapping[str, object], where: str
) -> dict[str, object]:
    """Return the figure `shared_experts`, if the file has it; refuse figures that `Model` cannot have."""
    width, expert_width = config.get("shared_expert_intermediate_size"), figures.get("expert_ffn")
    for name in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"):
        if config.get(name) not in (None, 1):
            raise UsageError(f"{where}: {name}: expected 1, experts in all layers but the first, got {config[name]!r}")
    if config.get("mlp_only_layers"):
        raise UsageError(f"{where}: mlp_only_layers: expected none, got {config['mlp_only_layers']!r}")
    if config.get("model_type") in ("llama4", "llama4_text"):
        return {"shared_experts": 1}
    if not isinstance(width, int) or not isinstance(expert_width, int) or not width or not expert_width:
        return {}
    if width % expert_width:
        raise UsageError(
            f"{where}: shared_expert_intermediate_size: expected a multiple of moe_intermediate_size ({expert_width}), "
            f"got {width}"
        )
    return {"shared_experts": width // expert_width}


def _models_folder() -> Path:
    """Return the folder of the models that come with the package."""
    return Path(str(files(__package__))) / "models"
