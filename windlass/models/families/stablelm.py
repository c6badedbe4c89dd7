"""StableLM: LayerNorm, partial RoPE; StableLM 2 12B has norms of each head, attention and MLP in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.models.families.base import Family, GGUFFamily, layer_norm, read_decoder
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule


def _stablelm(fields: Fields, architecture: str) -> HParams:
    parallel = fields.flag("use_parallel_residual", False)
    return read_decoder(
        fields.with_defaults({"partial_rotary_factor": 0.25}),
        architecture,
        norm=layer_norm(fields, placement="parallel" if parallel else "pre"),
        qkv_bias=fields.flag("use_qkv_bias", False),
        qk_norm="each_head" if fields.flag("qk_layernorm", False) else None,
        qk_norm_kind="layer",
    )


def _rules(hparams: HParams) -> Sequence[Rule]:
    """The norm of each head is a tensor of its own."""
    return [
        Rule(
            pattern=rf"(.*)\.{part}_layernorm\.norms\.{head}\.weight",
            name=rf"\1.{part}_norm.weight",
            stack=head,
        )
        for part, heads in (("q", hparams.num_heads), ("k", hparams.num_kv_heads))
        for head in range(heads)
    ]


def _gguf(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
    }


STABLELM = Family(
    model_type="stablelm", read=_stablelm, rules=_rules, gguf=GGUFFamily(config=_gguf)
)
