"""Converts the configs of EAGLE-3 heads saved by the speculators library to EAGLE-3's own layout.

The speculators layout nests the decoder layer's config beside the head's options and the name of
the model that it was trained for. Unsupported options are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Optional norms of a head: the fields of EagleNorms.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields outside the nested config that mean the same in both layouts.
_KEPT = ("draft_vocab_size", *NORMS, "speculators_config")
_INSTEAD = "Use an EAGLE-3 head without it, or train one with windlass train-draft."


def is_speculators(config: Mapping[str, Any]) -> bool:
    return _KIND in config or _LAYER in config


def flatten_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Convert a head's config of either layout to EAGLE-3's own layout."""
    if not is_speculators(config):
        return config
    fields = Fields(config, source, "Fetch the file again.")
    kind = fields.text(_KIND, None)
    if kind != "eagle3":
        raise UnsupportedError(
            f"{source}: {_KIND} is {kind!r}; only 'eagle3' heads of speculators are supported. "
            "Use such a head, or train one with windlass train-draft."
        )
    layer = dict(fields.mapping(_LAYER))
    _check_layer(Fields(layer, f"{source} ({_LAYER})"))
    _check_head(fields, layer)
    found = {**layer, **fields.present(*_KEPT), "architectures": ["LlamaForCausalLMEagle3"]}
    aux_layers = fields.sequence(_AUX_LAYERS)
    return {**found, "eagle_config": {_AUX_LAYERS: aux_layers}} if aux_layers else found


def verifier_of(config: Mapping[str, Any], source: str) -> str | None:
    """The name of the model that a head was trained for, if its config has it."""
    section = Fields(Fields(config, source).mapping("speculators_config"), source)
    return Fields(section.mapping("verifier"), source).text("name_or_path", None)


def _check_layer(layer: Fields) -> None:
    """Refuse any layer but one unquantised Llama layer with full attention."""
    kind = layer.text("model_type", "llama")
    if kind != "llama":
        raise UnsupportedError(
            f"{layer.source}: model_type is {kind!r}; only 'llama' layers are supported. {_INSTEAD}"
        )
    count = layer.positive_int("num_hidden_layers", 1)
    if count != 1:
        raise UnsupportedError(
            f"{layer.source}: num_hidden_layers is {count}; only heads of one layer are supported. "
            f"{_INSTEAD}"
        )
    kinds = layer.sequence("layer_types") or ()
    if any(each != "full_attention" for each in kinds):
        raise UnsupportedError(
            f"{layer.source}: layer_types is {list(kinds)}; only full_attention is supported. "
            f"{_INSTEAD}"
        )
    if layer.flag("mlp_bias", False):
        raise UnsupportedError(
            f"{layer.source}: mlp_bias is true: MLP biases are not supported. {_INSTEAD}"
        )
    _refuse_quantised(layer)


def _check_head(fields: Fields, layer: Mapping[str, Any]) -> None:
    _refuse_quantised(fields)
    if fields.flag("embed_requires_grad", False):
        raise UnsupportedError(
            f"{fields.source}: embed_requires_grad is true: the head was trained with its own "
            f"embeddings, and only the model's embeddings are supported. {_INSTEAD}"
        )
    width = layer.get("hidden_size")
    if "target_hidden_size" in fields and fields.positive_int("target_hidden_size") != width:
        raise UnsupportedError(
            f"{fields.source}: target_hidden_size is {fields.positive_int('target_hidden_size')}, but the "
            f"head's hidden_size is {width}: only heads as wide as the model are supported. "
            f"{_INSTEAD}"
        )
    if "norm_before_residual" not in fields:
        raise CheckpointError(
            f"{fields.source}: field 'norm_before_residual' is missing, and its default is "
            "ambiguous. Write true or false there, as the head was trained."
        )


def _refuse_quantised(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.mapping(name):
            raise UnsupportedError(
                f"{fields.source}: has a {name}: quantised heads are not supported. {_INSTEAD}"
            )
