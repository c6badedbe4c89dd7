"""Compile cases of the MLA kernels, with the sizes of DeepSeek models."""

from __future__ import annotations

from windlass.kernels.gpu import MEASURED, Gpu
from windlass.kernels.triton import latent, latent_kernels

X, F, I, FP8 = "*bf16", "*fp32", "*i32", "*fp8e4nv"  # noqa: E741
DIMS = {"RANK": 512, "RANK_PAD": 512, "SIZE": 16}
ROPE = {"ROPE": 64, "ROPE_PAD": 64}
STEP = {**dict.fromkeys(("positions", "token_slots", "tables"), I), "table_stride": "i32"}
ATTENTION = {**dict.fromkeys(("queries", "pages", "out"), X), **STEP, "scale": "fp32"}


def paged(signature: dict[str, str], codes: str | None) -> dict[str, str]:
    return signature if codes is None else {**signature, "pages": codes, "scales": F}


def write(codes: str | None = None) -> tuple:
    signature = {**dict.fromkeys(("q", "latent", "weight", "pages", "fresh", "rotated"), X), **STEP}
    signature |= {"cos_sin": F, "q_stride": "i32", "latent_stride": "i32", "eps": "fp32"}
    signature |= {"rotated_token": "i32", "rotated_head": "i32"}
    constants = {"NUM_Q": 128, "NUM_Q_PAD": 128, "NOPE": 128, "HALF": 32, "HALF_PAD": 32}
    constants |= {**DIMS, "INTERLEAVED": True}
    return latent_kernels.latent_write_kernel, paged(signature, codes), constants, {"num_warps": 4}


def per_head(few: bool, sizes: tuple[int, int]) -> tuple:
    strides = ("x_row", "x_head", "w_head", "out_row", "out_head")
    signature = {**dict.fromkeys(("x", "weight", "out"), X), "M": "i32"}
    num_in, num_out = sizes
    signature |= dict.fromkeys((*strides, "w_in" if num_in < num_out else "w_out"), "i32")
    options = latent._per_head_options(few, 128, num_out)
    constants = {key: options.pop(key) for key in ("ROWS", "OUTPUTS", "BLOCK_K")}
    constants |= {"K": num_in, "N": num_out, "w_out" if num_in < num_out else "w_in": 1}
    return latent_kernels.per_head_kernel, signature, constants, options


def decode(num_q: int, codes: str | None = None, splits: int = 8) -> tuple:
    heads = latent.decode_heads(num_q)
    options = latent._decode_options(heads, codes is not None)
    constants = {key: options.pop(key) for key in ("TILE", "MIN_TILES")}
    constants |= {"NUM_Q": num_q, "HEADS": heads, "SPLITS": splits, **DIMS, **ROPE}
    signature = {**ATTENTION, "counters": I, "singles": I}
    signature |= dict.fromkeys(("split_out", "split_max", "split_sum"), F)
    return latent_kernels.latent_decode_kernel, paged(signature, codes), constants, options


def prefill(num_q: int, codes: str | None = None, gpu: Gpu = MEASURED) -> tuple:
    options = latent._prefill_options(codes is not None, gpu.shared_bytes)
    constants = {key: options.pop(key) for key in ("ROWS", "TILE")}
    constants |= {"NUM_Q": num_q, "NUM_Q_PAD": num_q, **DIMS, **ROPE}
    signature = {
        key: kind for key, kind in ATTENTION.items() if key not in ("positions", "token_slots")
    }
    signature |= {"tiles": I}
    return latent_kernels.latent_prefill_kernel, paged(signature, codes), constants, options


LATENT = {
    "latent write": write(),
    "latent write fp8": write(FP8),
    "latent absorbed queries": per_head(True, (128, 512)),
    "latent absorbed queries of many tokens": per_head(False, (128, 512)),
    "latent outputs": per_head(True, (512, 128)),
    "latent outputs of many tokens": per_head(False, (512, 128)),
    "latent decode of 16 heads": decode(16),
    "latent decode of 128 heads": decode(128),
    "latent decode fp8 of 16 heads": decode(16, FP8),
    "latent decode fp8 of 128 heads": decode(128, FP8, splits=1),
    "latent decode int8 of 16 heads": decode(16, "*i8"),
    "latent prefill of 16 heads": prefill(16),
    "latent prefill of 16 heads with little shared memory": prefill(16, gpu=Gpu((8, 9))),
    "latent prefill of 128 heads": prefill(128),
    "latent prefill fp8 of 16 heads": prefill(16, FP8),
}
