"""Compile cases of the mixture-of-experts kernels, at the shapes of real models."""

from __future__ import annotations

from typing import Any

from windlass.kernels.triton import experts, experts_kernels, experts_routing

X, F, I = "*bf16", "*fp32", "*i32"  # noqa: E741
# Hidden size, intermediate size, experts, experts per token.
QWEN3, GPT_OSS, V2_LITE = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2048, 1408, 64, 6)


def expert_gemm(plan: int, model: tuple[int, int, int, int], gated: bool) -> tuple:
    """A GEMM of a plan of `PLANS`."""
    hidden, inner, _, top_k = model
    chosen = experts.PLANS[plan]
    tiling = chosen.gate_up if gated else chosen.down
    signature = {
        **dict.fromkeys(("x", "weight", "out"), X),
        "tile_experts": I,
        **{"alpha": "fp32", "limit": "fp32", "prefetched": "i32"},
    }
    if chosen.rows > 1:
        signature |= {"tile_rows": I, "pairs": I}
    oss = model is GPT_OSS
    if oss:
        signature["bias"] = X
    constants: dict[str, Any] = {
        "N": 2 * inner if gated else hidden,
        "K": hidden if gated else inner,
        "TOP_K": top_k if gated else 1,
        "GATED": gated,
        "ORDER": "interleaved" if oss else "halves",
        "KIND": "clamped" if oss else "silu",
        "ROWS": max(16, chosen.rows),
        "OUTPUTS": tiling.outputs,
        "BLOCK_K": tiling.block_k,
    }
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return experts_kernels.expert_gemm_kernel, signature, constants, options


def routing(groups: int, size: int, top_k: int, top_k_pad: int, counted: bool) -> tuple:
    signature = {"logits": X, "bias": F, "weights": F, "experts": I, "scale": "fp32"}
    if counted:
        signature |= {"counts": I, "places": I}
    constants: dict[str, Any] = {
        **{"NUM_GROUPS": groups, "GROUP_SIZE": size, "TOP_GROUPS": max(1, groups // 2)},
        **{"TOP2": True, "TOP_K": top_k, "SIGMOID": groups > 1, "NORMALISED": True},
        **{"GROUPS_PAD": groups, "SIZE_PAD": size, "TOP_K_PAD": top_k_pad},
    }
    return experts_routing.route_kernel, signature, constants, {"num_warps": 1}


EXPERTS = {
    "route, softmax": routing(1, 128, 8, 8, False),
    "route, groups": routing(8, 32, 8, 8, True),
    "route, 512 experts": routing(1, 512, 10, 16, True),
    "sort pairs": (
        experts_routing.sort_kernel,
        dict.fromkeys(("experts", "counts", "places", "pairs", "tile_experts", "tile_rows"), I)
        | {"num_pairs": "i32", "num_tiles": "i32"},
        {"NUM_EXPERTS": 128, "EXPERTS_PAD": 128, "ROWS": 64, "CHUNK": 64},
        {},
    ),
    "combine experts": (
        experts_kernels.combine_kernel,
        {"rows": X, "weights": F, "out": X},
        {"SIZE": 2880, "TOP_K": 4, "WIDTH": 512},
        {},
    ),
    **{
        f"{name} experts, {'gate_up' if gated else 'down'}, plan {plan}": expert_gemm(
            plan, model, gated
        )
        for name, model, plan, gated in (
            *(("Qwen3", QWEN3, plan, gated) for plan in range(5) for gated in (True, False)),
            ("gpt-oss", GPT_OSS, 0, True),
            ("gpt-oss", GPT_OSS, 0, False),
            ("gpt-oss", GPT_OSS, 3, True),
            ("V2-Lite", V2_LITE, 4, True),
        )
    },
}
