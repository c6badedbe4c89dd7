"""Reads the config.json of a model that runs through transformers' own code.

transformers' config object gives fields their common names (n_embd, n_head, n_positions, ...), and a probe
of the model gives its attention layers. No code of the model's repository is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.hparams import HParams, NormHParams
from windlass.models.nearest import nearest
from windlass.models.rope_config import RopeConfig
from windlass.models.transformers_model import TransformersModel

_INSTALL = "pip install 'windlass-llm[transformers]'"
_FORMATS = ("quantization_config", "compression_config")
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_OTHER_INPUTS = ("vision", "audio", "image", "video", "speech")
# Its frequencies depend on the longest row of a batch. Those of "dynamic" do only beyond
# max_position_embeddings, where contexts end.
_BATCH_ROPE = ("longrope",)


def read_transformers(values: Mapping[str, Any], source: str) -> HParams:
    """The hyper-parameters of a model of transformers. Raises UnsupportedError with the reason."""
    name = _name(values)
    auto = _library(name, source)
    types = {
        known: model_type for model_type, known in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    model_type = values.get("model_type") or types.get(name)
    if model_type not in auto.CONFIG_MAPPING_NAMES:
        if "auto_map" in values:
            raise UnsupportedError(
                f"{source}: {name} needs the Python code of its repository (auto_map), which is never "
                "executed. Use a model of an architecture that transformers has itself."
                f"{nearest(str(model_type))}"
            )
        raise UnsupportedError(
            f"{source}: {name} is neither an architecture of Windlass nor of the installed "
            f"transformers (model_type {model_type!r}). A newer transformers may have it."
            f"{nearest(str(model_type))}"
        )
    class_name = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if class_name is None or (values.get("architectures") and name != class_name):
        instead = f" Its causal language model is {class_name}." if class_name else ""
        raise UnsupportedError(
            f"{source}: {name} is not a causal language model of transformers, and only those can run."
            f"{instead} Text-only decoders, such as LlamaForCausalLM, work.{nearest(str(model_type))}"
        )
    return _read(values, source, class_name)


def _name(values: Mapping[str, Any]) -> str:
    listed = values.get("architectures")
    return str(listed[0]) if listed else str(values.get("model_type"))


def _library(name: str, source: str) -> Any:
    try:
        import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(
            f"{source}: {name} is not an architecture of Windlass. It may run through transformers, "
            f"which is not installed ({error}): {_INSTALL}."
        ) from error
    return import_module("transformers.models.auto.modeling_auto")


def _read(values: Mapping[str, Any], source: str, class_name: str) -> HParams:
    from windlass.models.transformers_probe import Refused

    transformers = import_module("transformers")
    model_class = getattr(transformers, class_name)
    # Formats of weights are read by quant/, not by transformers.
    plain = {key: value for key, value in values.items() if key not in _FORMATS}
    try:
        if model_class._is_stateful:
            raise Refused(
                "it keeps other state than keys and values, as Mamba and linear attention do"
            )
        config = _config(model_class, plain, source)
        _check(config)
        found = _probed(class_name, json.dumps(plain, sort_keys=True))
    except Refused as refused:
        kind = str(values.get("model_type") or class_name)
        raise UnsupportedError(
            f"{source}: {class_name} cannot run: {refused}. Windlass has no implementation of its own, "
            "and transformers' code runs only for decoders whose tokens meet in causal attention."
            f"{nearest(kind)}"
        ) from refused
    layer, max_positions = found.layers[0], _max_positions(config, source)
    dtype = getattr(config, "dtype", None)
    return HParams(
        architecture=class_name,
        hidden_size=found.hidden_size,
        num_layers=len(found.layers),
        num_heads=layer.num_q,
        num_kv_heads=layer.num_kv,
        head_dim=layer.dim,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * found.hidden_size,
        vocab_size=found.vocab_size,
        norm=NormHParams(eps=1e-6),
        rope=RopeConfig(theta=10000.0, dim=layer.dim, original_max_positions=max_positions),
        tie_embeddings=found.tied,
        attention_soft_cap=next((each.soft_cap for each in found.layers if each.soft_cap), None),
        attention_sinks=any(each.sinks for each in found.layers),
        sliding_windows=tuple(each.window for each in found.layers),
        max_positions=max_positions,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        bos_id=next(iter(_ids(config.bos_token_id)), None),
        eos_ids=_ids(config.eos_token_id),
        quantization=values.get("quantization_config") or values.get("compression_config") or {},
        source=source,
        transformers=found,
    )


def _config(model_class: Any, values: Mapping[str, Any], source: str) -> Any:
    try:
        return model_class.config_class.from_dict(dict(values))
    except Exception as error:  # its checks raise exceptions of many kinds
        message = " ".join(str(error).split())
        raise CheckpointError(f"{source}: transformers cannot read it: {message}") from error


@lru_cache(maxsize=4)
def _probed(class_name: str, config: str) -> TransformersModel:
    """Probe a model once; its headers are read several times."""
    from windlass.models.transformers_probe import probe

    values = json.loads(config)
    model_class = getattr(import_module("transformers"), class_name)
    return probe(model_class, model_class.config_class.from_dict(dict(values)), values)


def _check(config: Any) -> None:
    """Refuse what a config shows. Raises Refused."""
    from windlass.models.transformers_probe import Refused

    if getattr(config, "is_encoder_decoder", False):
        raise Refused("it is an encoder-decoder model")
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise Refused(
            f"its layers of the types {', '.join(sorted(others))} keep other state than KV"
        )
    inputs = [name for name in config.sub_configs if any(kind in name for kind in _OTHER_INPUTS)]
    if inputs:
        raise Refused(f"it reads more than text ({', '.join(inputs)})")
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if kind in _BATCH_ROPE:
            raise Refused(
                f"its RoPE type {kind!r} depends on the longest sequence of a batch; for contexts up to "
                "the trained length, set rope_parameters and max_position_embeddings with --hf-overrides"
            )


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The RoPE type, or those of all kinds of layers."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield from _rope_types(value)


def _max_positions(config: Any, source: str) -> int:
    for name in ("max_position_embeddings", "max_seq_len", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise CheckpointError(
        f"{source}: the context length is missing. Set max_position_embeddings with --hf-overrides."
    )


def _ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, (list, tuple)) else [value]
    return tuple(token for token in ids if isinstance(token, int) and token >= 0)
