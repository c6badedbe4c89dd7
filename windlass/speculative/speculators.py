"""EAGLE-3 heads as the library speculators saves them, in the terms of EAGLE-3's own layout.

The decoder layer's config is nested there, beside what the head does differently and the model that
it was trained for. Whatever would be computed otherwise here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Where a head normalises beside what all of them do: the fields of EagleNorms.
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields that are no part of the nested config, and mean the same in both layouts.
_KEPT = ("draft_vocab_size", *NORMS, "speculators_config")
_INSTEAD = "Take an EAGLE-3 head without it, or train one with windlass train-draft."


def is_speculators(config: Mapping[str, Any]) -> bool:
    return _KIND in config or _LAYER in config


def flat(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of a head in EAGLE-3's own layout, whichever layout it has."""
    if not is_speculators(config):
        return config
    fields = Fields(config, source, "Fetch the file again.")
    kind = fields.text(_KIND, None)
    if kind != "eagle3":
        raise UnsupportedError(
            f"{source}: {_KIND} is {kind!r}; of the heads of speculators only 'eagle3' is known. "
            "Take such a head, or train one with windlass train-draft."
        )
    layer = dict(fields.mapping(_LAYER))
    _check_layer(Fields(layer, f"{source} ({_LAYER})"))
    _check_head(fields, layer)
    found = {**layer, **fields.present(*_KEPT), "architectures": ["LlamaForCausalLMEagle3"]}
    aux_hidden_states = fields.sequence(_AUX_LAYERS)
    return (
        {**found, "eagle_config": {_AUX_LAYERS: aux_hidden_states}} if aux_hidden_states else found
    )


def verifier_of(config: Mapping[str, Any], source: str) -> str | None:
    """The model that a head was trained for, where it says so."""
    section = Fields(Fields(config, source).mapping("speculators_config"), source)
    return Fields(section.mapping("verifier"), source).text("name_or_path", None)


def _check_layer(layer: Fields) -> None:
    """One Llama layer that sees all the way back, in plain numbers, is what is computed here."""
    kind = layer.text("model_type", "llama")
    if kind != "llama":
        raise UnsupportedError(
            f"{layer.source}: model_type is {kind!r}; only a layer of 'llama' is known. {_INSTEAD}"
        )
    count = layer.positive_int("num_hidden_layers", 1)
    if count != 1:
        raise UnsupportedError(
            f"{layer.source}: num_hidden_layers is {count}; heads of one layer are known. {_INSTEAD}"
        )
    kinds = layer.sequence("layer_types") or ()
    if any(each != "full_attention" for each in kinds):
        raise UnsupportedError(
            f"{layer.source}: layer_types is {list(kinds)}; only full_attention is known. {_INSTEAD}"
        )
    if layer.flag("mlp_bias", False):
        raise UnsupportedError(
            f"{layer.source}: mlp_bias is true: biases of the gated product. {_INSTEAD}"
        )
    _refuse_rounded(layer)


def _check_head(fields: Fields, layer: Mapping[str, Any]) -> None:
    _refuse_rounded(fields)
    if fields.flag("embed_requires_grad", False):
        raise UnsupportedError(
            f"{fields.source}: embed_requires_grad is true: the head was trained with embeddings "
            f"of its own, and guesses are made with the model's here. {_INSTEAD}"
        )
    width = layer.get("hidden_size")
    if "target_hidden_size" in fields and fields.positive_int("target_hidden_size") != width:
        raise UnsupportedError(
            f"{fields.source}: target_hidden_size is {fields.positive_int('target_hidden_size')}, but the "
            f"head's hidden_size is {width}: only heads as wide as the model are known. {_INSTEAD}"
        )
    if "norm_before_residual" not in fields:
        raise CheckpointError(
            f"{fields.source}: field 'norm_before_residual' is missing, and what that means is read "
            "in both ways elsewhere. Write true or false there, as the head was trained."
        )


def _refuse_rounded(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        if fields.mapping(name):
            raise UnsupportedError(
                f"{fields.source}: has a {name}: heads are read in plain numbers only. {_INSTEAD}"
            )
