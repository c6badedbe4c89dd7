"""Compile cases of the mixture-of-experts kernels, at the shapes of real models."""

from __future__ import annotations

from typing import Any

from windlass.kernels.triton import experts, experts_inputs, experts_kernels, experts_routing

X, F, I, FP8 = "*bf16", "*fp32", "*i32", "*fp8e4nv"  # noqa: E741
# Hidden size, intermediate size, experts, experts per token.
QWEN3, GPT_OSS, V2_LITE = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2048, 1408, 64, 6)
NEMOTRON = 2688, 1856, 128, 6  # experts without a gate


# Types of the pointers, the group size and the super-group size of each form.
FORMS: dict[str, tuple[dict[str, str], int, int]] = {
    "wide": ({"codes": X}, 1, 1),
    "fp8": ({"codes": FP8, "scales": F}, 1, 1),
    "fp8 in blocks": ({"codes": FP8, "scales": F}, 128, 1),
    "fp8 with 16-bit activations": ({"codes": FP8, "scales": F}, 128, 128),
    "int8": ({"codes": "*i8", "scales": "*fp16", "offsets": "*fp16"}, 32, 32),
    "int4": ({"codes": "*u8", "scales": "*fp16", "offsets": "*fp16"}, 128, 128),
    "mxfp4": ({"codes": "*u8", "scales": "*i32"}, 32, 1),
    "nf4": ({"codes": "*u8", "scales": "*fp16", "table": F}, 64, 64),
    "sub-scales": ({"codes": "*u8", "scales": "*fp16", "sub_scales": "*i8", "table": F}, 32, 256),
}
KINDS = {"fp8 in blocks": "fp8", "mxfp4": "e2m1", "int8": "eight"}
KINDS |= {"fp8 with 16-bit activations": "eight", "wide": "wide", "fp8": "fp8"}


def expert_gemm(
    plan: int,
    model: tuple[int, int, int, int],
    gated: bool,
    form: str = "wide",
    divided: bool = False,
) -> tuple:
    """A GEMM of one of the form's plans."""
    pointers, group, super_group = FORMS[form]
    hidden, inner, _, top_k = model
    kind = KINDS.get(form, "four")
    chosen = experts.PLANS[form if form in experts.PLANS else kind][plan]
    tiling = chosen.gate_up if gated else chosen.down
    signature = {
        **dict.fromkeys(("x", "out"), X),
        **pointers,
        "tile_experts": I,
        **{"alpha": "fp32", "limit": "fp32", "M": "i32", "stride": "i32", "prefetched": "i32"},
        "num_experts": "i32",
    }
    if kind == "fp8" and (gated or chosen.rows > 1):
        signature |= {"x": FP8, "x_scales": F}
    if chosen.rows > 1:
        signature |= {"tile_rows": I, "pairs": I}
    if chosen.rows > 1 and gated:
        signature["counts"] = I
    oss = model is GPT_OSS
    if oss:
        signature["bias"] = X
    constants: dict[str, Any] = {
        "N": (inner if model is NEMOTRON else 2 * inner) if gated else hidden,
        "K": hidden if gated else inner,
        "TOP_K": top_k if gated else 1,
        "FORM": kind,
        "GROUP": group,
        "SUPER": super_group,
        "GATED": gated,
        "ORDER": "interleaved" if oss else "halves",
        "KIND": "clamped" if oss else "relu2" if model is NEMOTRON else "silu",
        "ROWS": max(16, chosen.rows),
        "OUTPUTS": tiling.outputs,
        "BLOCK_K": experts.block_k(kind, tiling),
        "STAGES": tiling.stages,
        "DIVIDED": divided,
    }
    warps = experts.num_warps(kind, chosen.rows, tiling)
    options = {"num_warps": warps, "num_stages": tiling.stages}
    return experts_kernels.expert_gemm_kernel, signature, constants, options


def routing(
    groups: int, size: int, top_k: int, top_k_pad: int, counted: bool, divided: bool = False
) -> tuple:
    signature = {"logits": X, "bias": F, "weights": F, "experts": I, "scale": "fp32"}
    if counted:
        signature |= {"counts": I, "places": I, "x": X, "x_codes": FP8, "x_scales": F}
    if divided:
        signature |= {"expert_map": I, "local": I, "load": "*i64"}
    constants: dict[str, Any] = {
        **{"K": 7168, "BLOCKS": groups > 1},
        **{"NUM_GROUPS": groups, "GROUP_SIZE": size, "TOP_GROUPS": max(1, groups // 2)},
        **{"TOP2": True, "TOP_K": top_k, "SIGMOID": groups > 1, "NORMALISED": True},
        **{"GROUPS_PAD": groups, "SIZE_PAD": size, "TOP_K_PAD": top_k_pad},
    }
    return experts_routing.route_kernel, signature, constants, {"num_warps": 1}


EXPERTS = {
    "route, softmax": routing(1, 128, 8, 8, False),
    "route, groups": routing(8, 32, 8, 8, True),
    "route, 512 experts": routing(1, 512, 10, 16, True),
    "route, groups divided among ranks": routing(8, 32, 8, 8, True, divided=True),
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
    "combine experts of other ranks": (
        experts_kernels.combine_kernel,
        {"rows": X, "weights": F, "local": I, "out": X},
        {"SIZE": 2880, "TOP_K": 4, "WIDTH": 512},
        {},
    ),
    "gate_up of single pairs, experts divided": expert_gemm(0, QWEN3, True, divided=True),
    "down of single pairs, experts divided": expert_gemm(0, QWEN3, False, divided=True),
    "quantise inputs of experts": (
        experts_inputs.quantise_inputs_kernel,
        {"x": X, "codes": FP8, "scales": F, "M": "i32"},
        {"K": 2880, "BLOCKS": False, "CHUNK": experts_inputs.CHUNK},
        {"num_warps": 1},
    ),
    **{
        f"{form} experts, {'gate_up' if gated else 'down'}, plan {plan}": expert_gemm(
            plan, model, gated, form
        )
        for form, model, plan, gated in (
            *(("fp8", QWEN3, plan, gated) for plan in range(6) for gated in (True, False)),
            *(("fp8 in blocks", QWEN3, plan, gated) for plan in (0, 3) for gated in (True, False)),
            ("fp8 with 16-bit activations", QWEN3, 3, False),
            *(("mxfp4", GPT_OSS, plan, gated) for plan in range(4) for gated in (True, False)),
            *((form, QWEN3, 0, False) for form in ("int8", "int4", "nf4", "sub-scales")),
            *((form, QWEN3, 3, True) for form in ("int8", "int4", "nf4", "sub-scales")),
        )
    },
    **{
        f"{name} experts, {'gate_up' if gated else 'down'}, plan {plan}": expert_gemm(
            plan, model, gated
        )
        for name, model, plan, gated in (
            *(("Qwen3", QWEN3, plan, gated) for plan in range(4) for gated in (True, False)),
            ("gpt-oss", GPT_OSS, 0, True),
            ("gpt-oss", GPT_OSS, 0, False),
            ("gpt-oss", GPT_OSS, 3, True),
            ("V2-Lite", V2_LITE, 3, True),
            *(("Nemotron", NEMOTRON, plan, True) for plan in (0, 1, 3)),
        )
    },
}
