"""Fields and tensor rules that families with mixtures of experts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from windlass.core.moe import Routing
from windlass.errors import CheckpointError
from windlass.models.fields import Fields
from windlass.models.hparams import HParams, MoEHParams
from windlass.models.tensor_rules import Rows, Rule

# Modules of a layer by their GGUF names.
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED_NAMES = {
    "exp_probs_b": "mlp.experts.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Fields of the numbers of experts; libraries differ in the first.
_TOTALS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_routing(fields: Fields, chosen: str = "num_experts_per_tok", **options: Any) -> Routing:
    """The routing. `chosen`: the field of the number of experts per token."""
    total = next((name for name in _TOTALS if name in fields), _TOTALS[0])
    count, top_k = fields.positive_int(total), fields.positive_int(chosen)
    if top_k > count:
        raise CheckpointError(
            f"{fields.source}: {chosen} is {top_k}, but {total} is {count}: a token cannot use more "
            "experts than there are."
        )
    groups, top_groups = options.get("num_groups", 1), options.get("top_groups", 1)
    if count % groups or top_groups > groups:
        raise CheckpointError(
            f"{fields.source}: {groups} groups do not divide {count} experts, or are fewer than the "
            f"{top_groups} groups that a token may use."
        )
    return Routing(num_experts=count, top_k=top_k, **options)


def grouped_moe(fields: Fields, routing: Routing) -> MoEHParams:
    """Read mixtures with shared experts after some dense layers, as DeepSeek's configs have them."""
    inner = fields.positive_int("moe_intermediate_size")
    first = fields.count("first_k_dense_replace", 0)
    step = fields.positive_int("moe_layer_freq", 1)
    layers = range(fields.positive_int("num_hidden_layers"))
    return MoEHParams(
        routing=routing,
        intermediate_size=inner,
        layers=tuple(layer >= first and layer % step == 0 for layer in layers),
        correction_bias=routing.score == "sigmoid",
        shared_intermediate_size=inner * fields.count("n_shared_experts", 0),
    )


def stacked_expert_rules(
    pattern: str,
    name: str,
    num_experts: int,
    rows_per_expert: int,
    part: tuple[int, int] | None = None,
) -> Iterator[Rule]:
    """Rules that split a tensor of all experts, [experts, rows, inputs].

    `name` contains {expert}. `part`: the expert's first and last row, for a fused gate and up.
    """
    start, stop = part or (0, rows_per_expert)
    for expert in range(num_experts):
        first = expert * rows_per_expert
        yield Rule(
            pattern=pattern,
            name=name.format(expert=expert),
            rows=Rows(first + start, first + stop, num_experts * rows_per_expert),
        )


def gguf_experts(keys: Fields, norm_topk_prob: bool) -> dict[str, Any]:
    """Fields of config.json for the experts of a GGUF file."""
    return {
        "num_experts": keys.positive_int("expert_count"),
        "num_experts_per_tok": keys.positive_int("expert_used_count"),
        "moe_intermediate_size": keys.positive_int("expert_feed_forward_length"),
        "norm_topk_prob": norm_topk_prob,
        "decoder_sparse_step": 1,
        # Files without dense layers may lack the field.
        "intermediate_size": keys.count("feed_forward_length", 0)
        or keys.positive_int("expert_feed_forward_length"),
    }


def gguf_expert_rules(hparams: HParams) -> list[Rule]:
    """Rules for llama.cpp's stacked experts."""
    assert hparams.moe is not None
    count, inner = hparams.moe.routing.num_experts, hparams.moe.intermediate_size
    sizes = {"gate_proj": inner, "up_proj": inner, "down_proj": hparams.hidden_size}
    return [
        rule
        for part, rows in sizes.items()
        for rule in stacked_expert_rules(
            rf"(.*\.experts)\.{part}\.(weight|bias)", rf"\1.{{expert}}.{part}.\2", count, rows
        )
    ]


def shared_expert_rules(hparams: HParams) -> list[Rule]:
    """Rules for shared experts and routers as DeepSeek names them; the network has no MTP layers."""
    layers = "|".join(str(layer) for layer in range(hparams.num_layers))
    return [
        Rule(
            pattern=rf"(model\.layers\.(?:{layers})\.mlp)\.shared_experts\.(.*)",
            name=r"\1.shared_expert.\2",
        ),
        Rule(
            pattern=rf"(model\.layers\.(?:{layers})\.mlp)\.gate\.e_score_correction_bias",
            name=r"\1.experts.e_score_correction_bias",
        ),
        Rule(pattern=rf"model\.layers\.(?!(?:{layers})\.).*", name=""),  # MTP
    ]
