"""Compile cases of the LoRA, drafting and verification kernels."""

from __future__ import annotations

from typing import Any

from windlass.kernels.triton import (
    eagle,
    lora_int8,
    lora_kernels,
    lora_tiles,
    medusa,
    typical,
    verify,
)

X, F, I, L = "*bf16", "*fp32", "*i32", "*i64"  # noqa: E741
EAGLE = dict.fromkeys(("table", "hidden", "gains", "hidden_gains", "out"), X)
EAGLE_INPUTS = {"ids": I, **EAGLE, "eps": "fp32"}
EAGLE_SELECT = {
    **dict.fromkeys(("indices", "positions", "slots", "positions_out", "slots_out"), I),
    **dict.fromkeys(("normed", "hidden", "normed_out", "hidden_out"), X),
}
EAGLE_ADVANCE = {
    **dict.fromkeys(("tokens", "positions", "positions_out"), I),
    **{"logits": X, "offsets": L, "eps": "fp32", "num_logits": "i32", "max_positions": "i32"},
    **EAGLE,
}
DEEPSEEK = {"SIZE": 7168, "WIDTH": 8192}


def lora_case(function: Any, codes: bool = False, **constants: int) -> tuple:
    """A LoRA kernel, for the three parts q, k and v by default."""
    signature = {
        **dict.fromkeys(("x", "y", "down", "up", "out"), X),
        **dict.fromkeys(("ranks", "slots", "tiles"), I),
        "sums": F,
        **dict.fromkeys(("M", "K", "N", "N0", "N1", "N2"), "i32"),
        **dict.fromkeys(("span", "splits", "rank_stride"), "i32"),
    }
    signature |= {"residual": X, "gains": X, "eps": "fp32"}
    if codes:
        signature |= {"down": "*i8", "up": "*i8", "scales": F}
    used = {name: kind for name, kind in signature.items() if name in function.arg_names}
    defaults = {"PARTS": 3, "MAX_RANK": 64, "PREFETCH": True, "UNIT": 16, "SCALED": codes}
    constants = {**defaults, "BY_OUTPUT": False, "ASM": True, **constants}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    # Single-token kernels have one warp, except the int8 shrink kernel.
    warps = 4 if "ROWS" in constants or function is lora_int8.shrink_codes_kernel else 1
    if "WIDTH" in constants:
        warps = 8 if codes else 16
    return function, used, constants, {"num_warps": warps}


def with_siblings(name: str, function: Any, **constants: int) -> dict[str, tuple]:
    """A verification kernel without and with siblings; its arguments are int32 arrays and scalars."""
    numbers = ("padding", "back_stride")
    names = [arg for arg in function.arg_names if not arg.isupper()]
    signature = {arg: "i32" if arg in numbers else I for arg in names}
    sizes = {"WIDTH": 5, "PAD": 8, **constants}
    return {
        f"{name}, {siblings} siblings": (
            *(function, signature, {**sizes, "SIBLINGS": siblings}, {"num_warps": 1}),
        )
        for siblings in (0, 2)
    }


LORA_AND_SPECULATION = {
    "lora shrink": lora_case(lora_kernels.shrink_kernel, BLOCK_K=256),
    "lora expand": lora_case(lora_kernels.expand_kernel, SPLITS=16, OUTPUTS=256),
    "lora expand, gated": lora_case(
        lora_kernels.expand_gated_kernel, PARTS=2, SPLITS=16, OUTPUTS=256
    ),
    "lora shrink of a tile": lora_case(lora_tiles.shrink_tile_kernel, ROWS=64, BLOCK_K=128),
    "lora expand of a tile": lora_case(lora_tiles.expand_tile_kernel, ROWS=64, OUTPUTS=64),
    "lora shrink, int8": lora_case(lora_int8.shrink_codes_kernel, True, BLOCK_K=1024, ASM=True),
    "lora expand, int8": lora_case(lora_kernels.expand_kernel, True, SPLITS=16, OUTPUTS=256),
    "lora expand, gated, int8": lora_case(
        lora_kernels.expand_gated_kernel, True, PARTS=2, SPLITS=16, OUTPUTS=256
    ),
    "lora expand, int8 by output": lora_case(
        lora_kernels.expand_kernel, True, SPLITS=16, OUTPUTS=256, MAX_RANK=16, BY_OUTPUT=True
    ),
    "lora expand, gated, int8 by output": lora_case(
        lora_kernels.expand_gated_kernel,
        True,
        **{"PARTS": 2, "SPLITS": 16, "OUTPUTS": 256, "MAX_RANK": 16, "BY_OUTPUT": True},
    ),
    "lora expand, norm": lora_case(
        lora_kernels.expand_norm_kernel, SPLITS=16, SIZE=4096, WIDTH=4096, MAX_RANK=16
    ),
    "lora expand, norm, int8 by output": lora_case(
        lora_kernels.expand_norm_kernel,
        True,
        **{"SPLITS": 32, "SIZE": 4096, "WIDTH": 4096, "MAX_RANK": 16, "BY_OUTPUT": True},
    ),
    "lora shrink of a tile, int8": lora_case(
        lora_tiles.shrink_tile_kernel, True, ROWS=64, BLOCK_K=128
    ),
    "lora expand of a tile, int8": lora_case(
        lora_tiles.expand_tile_kernel, True, ROWS=64, OUTPUTS=64
    ),
    **{
        f"medusa block, {rows} rows": (
            medusa.medusa_block_kernel,
            {**dict.fromkeys(("x", "weight", "bias", "out"), X), "indices": I}
            | dict.fromkeys(("M", "head_stride"), "i32"),
            {"SIZE": 576, "ROWS": rows, "OUTPUTS": 32, "BLOCK_K": 64},
            {},
        )
        for rows in (16, 64)
    },
    **{
        f"medusa scores, {rows} rows": (
            medusa.medusa_scores_kernel,
            {"x": X, "weight": X, "best": F, "best_at": I}
            | dict.fromkeys(("M", "vocab", "tiles"), "i32"),
            {"SIZE": 576, "ROWS": rows, "TOKENS": 128, "BLOCK_K": 64},
            {"num_stages": 4},
        )
        for rows in (16, 64)
    },
    "medusa join": (
        medusa.medusa_join_kernel,
        {"best": F, "best_at": I, "offsets": L, "drafts": I}
        | dict.fromkeys(("M", "heads", "tiles"), "i32"),
        {"COUNT": 3, "SIBLINGS": 2, "TILES": 512},
        {},
    ),
    "typical": (
        typical.typical_kernel,
        {"logits": X, **dict.fromkeys(("sampling", "floors"), F)}
        | dict.fromkeys(("slots", "drafts", "sampled"), I)
        | {"size": "i32", "stride": "i32", "epsilon": "fp32"},
        {"TILE": 2048},
        {"num_warps": 8},
    ),
    **with_siblings("verify inputs", verify.verify_inputs_kernel),
    **with_siblings("keep", verify.keep_kernel),
    **with_siblings("write next", verify.write_next_kernel, NEXT=5, DEPTH=4),
    "adopt": (
        verify.adopt_kernel,
        {"pages": X, **dict.fromkeys(("inputs", "chosen", "tables"), I)}
        | {"table_stride": "i32", "half_stride": "i64", "spare": "i32"},
        {"WIDTH": 5, "SIBLINGS": 2, "NUM_KV": 3, "DIM": 64, "DIM_PAD": 64, "SIZE": 16},
        {"num_warps": 1},
    ),
    "eagle inputs": (eagle.eagle_inputs_kernel, EAGLE_INPUTS, {"SIZE": 576, "WIDTH": 1024}, {}),
    "mtp inputs": (eagle.eagle_inputs_kernel, EAGLE_INPUTS, DEEPSEEK, {}),
    "eagle select": (eagle.eagle_select_kernel, EAGLE_SELECT, {"SIZE": 576, "WIDTH": 1024}, {}),
    "mtp select": (eagle.eagle_select_kernel, EAGLE_SELECT, DEEPSEEK, {}),
    "eagle advance": (
        eagle.eagle_advance_kernel,
        EAGLE_ADVANCE,
        {"SIZE": 4096, "WIDTH": 4096, "TILE": 2048},
        {"num_warps": 8},
    ),
    "mtp advance": (
        eagle.eagle_advance_kernel,
        EAGLE_ADVANCE,
        {**DEEPSEEK, "TILE": 2048},
        {"num_warps": 8},
    ),
}
