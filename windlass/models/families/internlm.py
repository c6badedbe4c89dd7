"""InternLM 2 and 3: Llama with other names of the biases, and in 2 of the tensors.

InternLM 2 stores q, k and v together: for each KV head its query heads, then the key, then the value.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.models.families.base import Family, GGUFFamily, fused_qkv, read_decoder
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule, renames


def _internlm2(fields: Fields, architecture: str) -> HParams:
    has_bias = fields.flag("bias", fields.flag("attention_bias", False))  # the latter of GGUF files
    return read_decoder(fields, architecture, qkv_bias=has_bias, o_bias=has_bias)


def _internlm3(fields: Fields, architecture: str) -> HParams:
    has_bias = fields.flag("bias", False)
    return read_decoder(
        fields,
        architecture,
        qkv_bias=fields.flag("qkv_bias", False),
        o_bias=has_bias,
        mlp_bias=has_bias,
    )


def _internlm2_rules(hparams: HParams) -> Sequence[Rule]:
    layer = "model.layers.*"
    names = {
        "model.tok_embeddings": "model.embed_tokens",
        "output": "lm_head",
        f"{layer}.attention.wo": f"{layer}.self_attn.o_proj",
        f"{layer}.attention_norm": f"{layer}.input_layernorm",
        f"{layer}.ffn_norm": f"{layer}.post_attention_layernorm",
        f"{layer}.feed_forward.w1": f"{layer}.mlp.gate_proj",
        f"{layer}.feed_forward.w3": f"{layer}.mlp.up_proj",
        f"{layer}.feed_forward.w2": f"{layer}.mlp.down_proj",
    }
    qkv = fused_qkv(hparams, f"{layer}.attention.wqkv", groups=hparams.num_kv_heads)
    return [*qkv, *renames(names)]


INTERNLM2 = Family(
    model_type="internlm2",
    read=_internlm2,
    rules=_internlm2_rules,
    gguf=GGUFFamily(permuted=True),
)
# llama.cpp stores InternLM 3 as llama.
INTERNLM3 = Family(model_type="internlm3", read=_internlm3)
