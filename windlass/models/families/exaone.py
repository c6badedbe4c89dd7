"""EXAONE 3 and 3.5: Llama with other names.

EXAONE 4: norms of the sublayers' outputs and of each head; with windows, full layers do not rotate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import (
    Family,
    GGUFFamily,
    activation,
    gguf_windows,
    periodic_windows,
    read_decoder,
)
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, NormHParams
from windlass.models.tensor_rules import Rule, renames

_FIELDS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}


def _exaone3(fields: Fields, architecture: str) -> HParams:
    fields = fields.updated(**fields.renamed(_FIELDS))
    kind = activation(fields, "activation_function")
    return read_decoder(fields, architecture, activation=kind)


def _exaone3_rules(hparams: HParams) -> Sequence[Rule]:
    del hparams
    old, new = "transformer.h.*", "model.layers.*"
    names = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        f"{old}.ln_1": f"{new}.input_layernorm",
        f"{old}.ln_2": f"{new}.post_attention_layernorm",
        f"{old}.attn.attention.out_proj": f"{new}.self_attn.o_proj",
        f"{old}.mlp.c_fc_0": f"{new}.mlp.gate_proj",
        f"{old}.mlp.c_fc_1": f"{new}.mlp.up_proj",
        f"{old}.mlp.c_proj": f"{new}.mlp.down_proj",
    }
    names |= {f"{old}.attn.attention.{x}_proj": f"{new}.self_attn.{x}_proj" for x in "qkv"}
    return renames(names)


def _exaone4(fields: Fields, architecture: str) -> HParams:
    hparams = read_decoder(
        fields,
        architecture,
        norm=NormHParams(eps=fields.number("rms_norm_eps", 1e-5), placement="post"),
        qk_norm="head",
    )
    window = fields.positive_int_or_none("sliding_window", 4096)
    if window is None:
        return hparams
    pattern = fields.present("sliding_window_pattern").get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and "layer_types" not in fields:
        raise UnsupportedError(
            f"{fields.source}: sliding_window_pattern is {pattern!r}; a number is supported, or "
            "layer_types."
        )
    windows = periodic_windows(fields, window)
    ropes = tuple(None if each is None else hparams.rope for each in windows)
    return replace(hparams, sliding_windows=windows, layer_ropes=ropes)


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del header
    return {"sliding_window": None, **gguf_windows(keys)}


EXAONE3 = Family(model_type="exaone", read=_exaone3, rules=_exaone3_rules)
EXAONE4 = Family(
    model_type="exaone4",
    read=_exaone4,
    gguf=GGUFFamily(
        names={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gguf,
    ),
)
