"""Every Triton kernel compiles for all GPUs without one; on sm_90 none spills registers.

One case of each kernel is compiled. With WINDLASS_COMPILE_ALL=1 (`make test-compile`) all cases are.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator

import pytest

triton = pytest.importorskip("triton")

from triton.runtime import JITFunction  # noqa: E402

from tests.kernels.chunk_cases import CHUNKS  # noqa: E402
from tests.kernels.compile_cases import LORA_AND_SPECULATION  # noqa: E402
from tests.kernels.compiled import Case, compiled, is_gluon, needs_fp8  # noqa: E402
from tests.kernels.expert_cases import EXPERTS  # noqa: E402
from tests.kernels.gluon_cases import GLUON  # noqa: E402
from tests.kernels.latent_cases import LATENT  # noqa: E402
from tests.kernels.recurrent_cases import RECURRENT  # noqa: E402
from windlass.kernels import triton as kernels  # noqa: E402
from windlass.kernels.gpu import MEASURED, Gpu  # noqa: E402
from windlass.kernels.triton import (  # noqa: E402
    all_reduce,
    attention,
    attention_kernels,
    block_copy,
    eight_bit,
    fp8_kernels,
    gemv,
    grouped,
    grouped_linear,
    grouped_row,
    latent,
    logits,
    norm,
    quantise,
    rope,
    sample,
    skinny,
    table,
    wide,
)

X, F, I, L = "*bf16", "*fp32", "*i32", "*i64"  # noqa: E741
FP8 = "*fp8e4nv"
# Accumulators of 128 rows by 256 dimensions fill the registers; the inner loop does not spill. The
# threshold spills two words since Triton 3.7.
MAY_SPILL = {
    "prefill fp8 256": 256,
    "threshold": 8,
    "selective scan of pieces": 16,
    "decode 512 raw, normed": 32,
}

DECODE = {
    **dict.fromkeys(("queries", "keys", "values", "out"), X),
    **dict.fromkeys(("split_out", "split_max", "split_sum"), F),
    **dict.fromkeys(("counters", "singles", "positions", "token_slots", "tables"), I),
    **{"table_stride": "i32", "scale": "fp32", "cap": "fp32", "window": "i32"},
    **{"width": "i32", "spare": "i32", "cos_sin": F, "q_weight": X, "k_weight": X, "eps": "fp32"},
}
BLOCKS = {
    **dict.fromkeys(("pages", "ids", "records"), L),
    **dict.fromkeys(("num_blocks", "words", "stride"), "i32"),
}
PREFILL = {
    **dict.fromkeys(("queries", "keys", "values", "out"), X),
    **dict.fromkeys(("tiles", "tables"), I),
    **{"table_stride": "i32", "scale": "fp32", "cap": "fp32", "window": "i32"},
}
ROPE = {
    **dict.fromkeys(("qkv", "q_out", "keys", "values", "q_weight", "k_weight"), X),
    **dict.fromkeys(("positions", "token_slots", "tables"), I),
    **{"cos_sin": F, "table_stride": "i32", "eps": "fp32"},
}
GEMM = {
    **dict.fromkeys(("x", "weight", "out"), X),
    **dict.fromkeys(("M", "N", "K", "prefetched"), "i32"),
}


def without(signature: dict[str, str], name: str) -> dict[str, str]:
    return {key: kind for key, kind in signature.items() if key != name}


def paged(signature: dict[str, str], codes: str | None) -> tuple[dict[str, str], dict[str, None]]:
    """A kernel's signature and constants for unquantised pages, or for codes with scales."""
    scales = ("key_scales", "value_scales")
    if codes is None:
        return signature, dict.fromkeys(scales)
    return {**signature, "keys": codes, "values": codes, **dict.fromkeys(scales, F)}, {}


def decode(
    dim: int,
    pad: int,
    splits: int,
    special: bool = False,
    raw: bool = False,
    normed: bool = False,
    codes: str | None = None,
    new: int = 1,
    siblings: int = 0,
    sinks: bool = False,
    unscaled: bool = False,
    rotation: dict[str, object] | None = None,
    chunked: bool = False,
) -> tuple:
    heads = {"NUM_Q": 32, "NUM_KV": 8, "GROUP": 4, "DIM": dim, "DIM_PAD": pad, "SIZE": 16}
    heads["STRIDE"] = 8 * 16
    flags = {"SPLITS": splits, "ALL_SINGLES": True, "WINDOWED": special, "CAPPED": special}
    flags["CHUNKED"] = chunked
    flags = {**flags, "RAW": raw, "NEW": new, "SIBLINGS": siblings}
    flags = {**flags, "ROTATED": dim if raw else 0, "NORM": "rms" if normed else None}
    flags = {**flags, "INTERLEAVED": False, "PER_HEAD": False, **(rotation or {})}
    options = attention._decode_options(pad, splits, codes is not None)
    constants = {key: options.pop(key) for key in ("TILE", "MIN_TILES")}
    base = DECODE if flags["ROTATED"] or not raw else without(DECODE, "cos_sin")
    signature, scales = paged({**base, "sinks": F} if sinks else base, codes)
    if unscaled:
        signature = {**signature, "q_rows": F, "q_columns": F}
    constants = {**heads, **flags, **constants, **scales}
    return attention_kernels.paged_decode_kernel, signature, constants, options


def prefill(
    dim: int,
    pad: int,
    special: bool = False,
    codes: str | None = None,
    fresh: bool = False,
    sinks: bool = False,
    chunked: bool = False,
) -> tuple:
    heads = {"NUM_Q": 32, "NUM_KV": 8, "GROUP": 4, "GROUP_PAD": 4, "DIM": dim, "DIM_PAD": pad}
    flags = {
        "SIZE": 16,
        "STRIDE": 8 * 16,
        "WINDOWED": special,
        "CHUNKED": chunked,
        "CAPPED": special,
        "BATCH_INVARIANT": False,
    }
    options = attention._prefill_options(pad, codes is not None and not fresh)
    flags |= {name: options.pop(name) for name in ("ROWS", "TILE")}
    signature, scales = paged({**PREFILL, "sinks": F} if sinks else PREFILL, codes)
    if fresh:
        signature = {**signature, "new_keys": X, "new_values": X}
    constants = {**heads, **flags, **scales}
    return attention_kernels.paged_prefill_kernel, signature, constants, options


def rotate(
    normed: bool, codes: str | None = None, raw: bool = False, dim: int = 128, **flags: object
) -> tuple:
    constants = {"NUM_KV": 8, "GROUP": 4, "GROUP_PAD": 4, "DIM": dim, "ROTATED": dim}
    constants |= {"HALF_PAD": triton.next_power_of_2(dim // 2), "NORM": "rms" if normed else None}
    constants |= {"INTERLEAVED": False, "PER_HEAD": False, **flags}
    signature, scales = paged(ROPE if constants["ROTATED"] else without(ROPE, "cos_sin"), codes)
    if raw:
        signature = {**signature, "qkv_rows": F, "qkv_columns": F}
    constants = {**constants, "SIZE": 16, "STRIDE": 8 * 16, **scales}
    return rope.rope_write_kernel, signature, constants, {"num_warps": 1}


def skinny_gemm(rows: int, outputs: int, split: bool, stages: int) -> tuple:
    signature = {**GEMM, "partial_sums": F, "counters": I, "splits": "i32"}
    constants = {"SPLIT": split, "ROWS": rows, "OUTPUTS": outputs, "BLOCK_K": 128}
    return skinny.skinny_linear_kernel, signature, constants, {"num_stages": stages}


def one_row(
    takes: bool = False, leaves: bool = False, gated: bool = False, fp8: bool = False
) -> tuple:
    """`takes`: an RMS norm. `leaves`: one to the next GEMM."""
    signature = dict(GEMM)
    if takes:
        signature |= {"gains": X, "squares": F, "eps": "fp32", "tiles": "i32"}
    if leaves:
        signature |= {"out_squares": F}
    if fp8:
        signature |= {"weight": FP8, "scales": F}
    constants = {"TILES": 128 if takes else 1, "GATED": gated}
    constants |= {"OUTPUTS": 8, "WIDTH": 4096, "EVEN": not gated}
    return gemv.gemv_kernel, signature, constants, {"num_warps": 16}


def fp8_gemm(quantised: bool, even: bool, split: bool) -> tuple:
    signature = {**GEMM, "codes": FP8, "scales": F}
    signature |= {"partial_sums": F, "counters": I, "splits": "i32"}
    constants = {"SPLIT": split, "ROWS": 16, "OUTPUTS": 64, "BLOCK_K": 128, "EVEN": even}
    if quantised:
        signature = {**signature, "x": FP8, "x_scales": F}
    options = {"num_stages": 6 if quantised else 4}
    return fp8_kernels.fp8_linear_kernel, signature, constants, options


def fp8_gated(quantised: bool) -> tuple:
    signature = {**GEMM, "codes": FP8, "scales": F}
    if quantised:
        signature = {**signature, "x": FP8, "x_scales": F}
    sizes = {"ROWS": 16, "OUTPUTS": 64, "BLOCK_K": 128, "EVEN": True}
    options = {"num_stages": 3 if quantised else 4}
    return fp8_kernels.fp8_gated_kernel, signature, sizes, options


def grouped_gemm(bits: int, group: int, half: int, rows: int, planes: int = 2) -> tuple:
    signature = {"x": "*i8", "codes": "*u8" if bits == 4 else "*i8", "out": X}
    signature = {
        **signature,
        **dict.fromkeys(("x_scales", "x_sums", "partial_sums"), F),
        "counters": I,
    }
    signature = {**signature, "scales": "*fp16", "offsets": "*fp16"}
    signature = {**signature, **dict.fromkeys(("M", "N", "K_PAD", "splits", "prefetched"), "i32")}
    constants = {"BITS": bits, "GROUP": group, "HALF": half, "PLANES": planes, "SPLIT": True}
    constants = {**constants, "ROWS": rows, "OUTPUTS": 64, "EVEN": True, "INLINE": True}
    return grouped.grouped_linear_kernel, signature, constants, {"num_stages": 3}


def one_row_of_groups(bits: int, group: int, half: int) -> tuple:
    signature = {"x": I, "codes": I, "out": X, **dict.fromkeys(("x_scales", "x_sums"), F)}
    signature |= {"scales": "*fp16", "offsets": "*fp16"}
    signature |= dict.fromkeys(("N", "stride", "plane_stride"), "i32")
    constants = {"BITS": bits, "GROUP": group, "HALF": half, "BLOCKS": 2048 // half}
    constants |= {"OUTPUTS": 16, "INLINE": True}
    return grouped_row.grouped_row_kernel, signature, constants, {"num_warps": 4}


def eight_bit_gemm(codes: str, in_blocks: bool) -> tuple:
    signature = {**dict.fromkeys(("x", "codes"), codes), "out": X}
    signature = {
        **signature,
        **dict.fromkeys(("x_scales", "scales", "partial_sums"), F),
        "counters": I,
    }
    signature = {**signature, **dict.fromkeys(("M", "N", "K", "splits"), "i32")}
    constants = {"BLOCKS": in_blocks, "SPLIT": True, "ROWS": 64, "OUTPUTS": 64, "BLOCK_K": 128}
    return eight_bit.eight_bit_kernel, signature, constants, {"num_stages": 4}


def gated(rows: int, outputs: int, stages: int) -> tuple:
    constants = {"ROWS": rows, "OUTPUTS": outputs, "BLOCK_K": 128}
    return skinny.skinny_gated_kernel, GEMM, constants, {"num_stages": stages}


SAMPLE = {"logits": X, "sampling": F, "slots": I, "thresholds": F, "size": "i32", "stride": "i32"}
SPLIT = {**SAMPLE, "seeds": L, "positions": I, "best": F, "best_at": I}
JOIN = {"best": F, "best_at": I, "slots": I, "tokens": I, "last_tokens": I}
COUNT = {"tokens": I, "slots": I, "tables": L}
CHANGE = {
    **dict.fromkeys(("rows", "slots", "mask_rows", "masks"), I),
    **{"logits": X, "tables": L, "penalties": F, "scores": F},
    **dict.fromkeys(("size", "stride", "mask_stride"), "i32"),
}
INPUTS = {
    **dict.fromkeys(("inputs", "last_tokens", "tables", "ids", "positions", "slots"), I),
    **{"width": "i32", "table_stride": "i32"},
}
NORM = {"x": X, "weight": X, "out": X, "eps": "fp32"}


def codebook_gemm(rows: int, group: int, super_group: int) -> tuple:
    signature = {
        **dict.fromkeys(("x", "out"), X),
        **{"codes": "*u8", "table": F, "scales": "*fp16", "partial_sums": F, "counters": I},
        **dict.fromkeys(("M", "N", "K", "splits"), "i32"),
    }
    if super_group > group:
        signature["sub_scales"] = "*i8"
    sizes = {"GROUP": group, "SUPER": super_group, "ROWS": rows, "OUTPUTS": 64}
    return table.table_linear_kernel, signature, {"SPLIT": True, **sizes}, {"num_stages": 3}


def summed(two_shot: bool, normed: bool, in_planes: bool = False) -> tuple:
    signature = {"x": X, "out": X, "eps": "fp32", "buffers": L, "counters": I, "rank": "i32"}
    if normed:
        signature |= {"residual": X, "weight": X, "out": FP8, "out_scales": F}
    sizes = {"SIZE": 8192, "WIDTH": 8192, "ROWS": 256, "SLOT": 32768}
    constants = {"RANKS": 8, "LANES": 8, "TWO_SHOT": two_shot, **sizes}
    if in_planes:
        signature, constants = {**signature, **PLANES}, {**constants, **BLOCKWISE}
    return all_reduce.all_reduce_kernel, signature, constants, {"num_warps": 16}


# Results in two int8 planes.
PLANES = {"out": "*i8", "out_scales": F, "out_sums": F}
BLOCKWISE = {"BLOCK": 256, "GROUP": 128}

CASES = {
    "all_reduce": summed(False, False),
    "all_reduce with a norm, quantised": summed(False, True),
    "all_reduce with a norm, in planes": summed(False, True, True),
    "all_reduce, two-shot": summed(True, False),
    "all_reduce, two-shot, with a norm": summed(True, True),
    "rms_norm": (
        norm.rms_norm_kernel,
        {**NORM, "stride": "i32"},
        {"SIZE": 4096, "WIDTH": 4096, "GROUPS": 1},
        {},
    ),
    "rms_norm in planes": (
        norm.rms_norm_kernel,
        {**NORM, "stride": "i32", **PLANES},
        {"SIZE": 4096, "WIDTH": 4096, "GROUPS": 1, **BLOCKWISE},
        {"num_warps": 16},
    ),
    "rms_norm of groups": (
        norm.rms_norm_kernel,
        {**NORM, "stride": "i32"},
        {"SIZE": 512, "WIDTH": 512, "GROUPS": 8},
        {},
    ),
    "add_rms_norm": (
        norm.add_rms_norm_kernel,
        {**NORM, "residual": X},
        {"SIZE": 576, "WIDTH": 1024},
        {},
    ),
    "add_rms_norm in planes": (
        norm.add_rms_norm_kernel,
        {**NORM, "residual": X, **PLANES},
        {"SIZE": 4096, "WIDTH": 4096, **BLOCKWISE},
        {"num_warps": 16},
    ),
    "add_rms_norm of 8192 values in planes with groups of 32": (
        norm.add_rms_norm_kernel,
        {**NORM, "residual": X, **PLANES},
        {"SIZE": 8192, "WIDTH": 8192, "BLOCK": 64, "GROUP": 32},
        {"num_warps": 16},
    ),
    "add_rms_norm of unscaled outputs, quantised": (
        norm.add_rms_norm_kernel,
        {**NORM, "residual": X, "x_rows": F, "x_columns": F, "out": FP8, "out_scales": F},
        {"SIZE": 4096, "WIDTH": 4096},
        {"num_warps": 8},
    ),
    "qk_norm": (
        norm.qk_norm_kernel,
        {**dict.fromkeys(("qkv", "q_weight", "k_weight"), X), "stride": "i32", "eps": "fp32"},
        {"Q_SIZE": 5120, "K_SIZE": 1024, "WIDTH": 8192},
        {"num_warps": 16},
    ),
    "silu_mul": (norm.silu_mul_kernel, {"gate_up": X, "out": X}, {"SIZE": 1536, "WIDTH": 1024}, {}),
    "silu_mul in planes": (
        norm.silu_mul_kernel,
        {"gate_up": X, **PLANES},
        {"SIZE": 14336, "WIDTH": 1024, **BLOCKWISE},
        norm._silu_options(False, False),
    ),
    "silu_mul of unscaled outputs, quantised": (
        norm.silu_mul_kernel,
        {"gate_up": X, "rows": F, "columns": F, "out": FP8, "out_scales": F},
        {"SIZE": 14336, "WIDTH": 16384},
        norm._silu_options(True, True),
    ),
    "silu_mul quantised": (
        norm.silu_mul_kernel,
        {"gate_up": X, "out": FP8, "out_scales": F},
        {"SIZE": 14336, "WIDTH": 16384},
        norm._silu_options(True, False),
    ),
    "quantise rows": (
        quantise.quantise_rows_kernel,
        {"x": X, "codes": FP8, "scales": F},
        {"SIZE": 4096, "WIDTH": 4096},
        {"num_warps": 8},
    ),
    "quantise blocks": (
        quantise.quantise_blocks_kernel,
        {"x": X, "codes": "*i8", "scales": F, "sums": F, "K": "i32"},
        {"K_PAD": 4096, "BLOCK": 256, "GROUP": 128},
        {"num_warps": 1},
    ),
    "quantise to int8": (
        eight_bit.quantise_kernel,
        {"x": X, "codes": "*i8", "scales": F, "K": "i32"},
        {"MAX_CODE": 127.0, "WIDTH": 4096},
        {"num_warps": 8},
    ),
    "dequantise": (
        grouped_linear.dequantise_kernel,
        {"codes": "*u8", "scales": "*fp16", "offsets": "*fp16", "out": X}
        | dict.fromkeys(("M", "N", "K", "K_PAD"), "i32"),
        {"BITS": 4, "GROUP": 128, "HALF": 128, "ROWS": 32},
        {},
    ),
    "dequantise a codebook": (
        table.dequantise_table_kernel,
        {"codes": "*u8", "table": F, "scales": "*fp16", "out": X}
        | dict.fromkeys(("M", "N", "K"), "i32"),
        {"GROUP": 64, "SUPER": 64, "ROWS": 32},
        {},
    ),
    "int4 GEMM": grouped_gemm(4, 128, 128, 8),
    "int4 GEMM of one row": one_row_of_groups(4, 128, 128),
    "int8 GEMM of one row, groups of 32": one_row_of_groups(8, 32, 32),
    "int4 GEMM of many rows": grouped_gemm(4, 128, 128, 64, planes=1),
    "int4 GEMM of many rows in two planes": grouped_gemm(4, 128, 128, 64),
    "int4 GEMM, groups of 64": grouped_gemm(4, 64, 64, 16),
    "int8 GEMM, groups of 32": grouped_gemm(8, 32, 32, 8),
    "int8 GEMM": eight_bit_gemm("*i8", False),
    "fp8 GEMM in blocks": eight_bit_gemm(FP8, True),
    "codebook GEMM": codebook_gemm(64, 64, 64),
    "codebook GEMM with sub-scales": codebook_gemm(16, 32, 256),
    "codebook GEMM with sub-scales, groups of 16": codebook_gemm(64, 16, 256),
    "fp8 GEMM": fp8_gemm(True, True, True),
    "fp8 GEMM that quantises": fp8_gemm(False, True, True),
    "fp8 GEMM that quantises, odd": fp8_gemm(False, False, False),
    "fp8 gated": fp8_gated(True),
    "fp8 gated that quantises": fp8_gated(False),
    "rope_write": rotate(False),
    "rope_write of unscaled outputs": rotate(False, FP8, raw=True),
    "rope_write normed": rotate(True),
    "rope_write fp8": rotate(False, FP8),
    "rope_write int8": rotate(True, "*i8"),
    "rope_write partial": rotate(False, dim=80, ROTATED=32),
    "rope_write interleaved, LayerNorm": rotate(
        False, INTERLEAVED=True, NORM="layer", PER_HEAD=True
    ),
    "rope_write interleaved, partial, int8": rotate(
        True, "*i8", dim=96, ROTATED=48, INTERLEAVED=True
    ),
    "rope_write without rotation": rotate(True, FP8, dim=64, ROTATED=0),
    "decode 64 with sinks": decode(64, 64, 8, raw=True, sinks=True),
    "decode 64 with sinks, fp8": decode(64, 64, 1, True, codes=FP8, sinks=True),
    "decode 256 raw, normed, special": decode(256, 256, 4, True, raw=True, normed=True),
    "decode 80 partial": decode(80, 128, 8, raw=True, rotation={"ROTATED": 32}),
    "decode 128 interleaved, LayerNorm, with siblings": decode(
        *(128, 128, 8, True),
        raw=True,
        new=8,
        siblings=2,
        rotation={"INTERLEAVED": True, "NORM": "layer", "PER_HEAD": True},
    ),
    "decode 96 without rotation": decode(96, 128, 2, raw=True, rotation={"ROTATED": 0}),
    "prefill 64 with sinks": prefill(64, 64, True, sinks=True),
    "prefill 64 with sinks, fp8 fresh": prefill(64, 64, True, FP8, fresh=True, sinks=True),
    "prefill 80": prefill(80, 128),
    "prefill 256 special": prefill(256, 256, True),
    "decode 128": decode(128, 128, 1),
    "decode 128 split": decode(128, 128, 8),
    "decode 128 in many splits": decode(128, 128, 64, raw=True),
    "decode 64 with sinks in many splits, fp8": decode(64, 64, 128, codes=FP8, sinks=True),
    "decode 96 special": decode(96, 128, 8, True),
    "decode 128 raw, normed, in chunks": decode(
        128, 128, 4, True, raw=True, normed=True, chunked=True, rotation={"INTERLEAVED": True}
    ),
    "decode 256": decode(256, 256, 4),
    "decode 512": decode(512, 512, 4),
    "decode 512 raw, normed": decode(512, 512, 4, raw=True, normed=True),
    "decode raw": decode(128, 128, 2, raw=True),
    "decode raw normed": decode(64, 64, 8, raw=True, normed=True),
    "decode raw, up to 8 tokens": decode(64, 64, 8, raw=True, new=8),
    "decode raw, up to 16 tokens": decode(128, 128, 8, raw=True, new=16),
    "decode raw with siblings": decode(64, 64, 8, raw=True, new=8, siblings=2),
    "decode fp8": decode(128, 128, 1, codes=FP8),
    "decode fp8 special": decode(96, 128, 8, True, codes=FP8),
    "decode fp8 256": decode(256, 256, 4, codes=FP8),
    "decode fp8 raw": decode(128, 128, 2, raw=True, codes=FP8),
    "decode fp8 raw normed": decode(64, 64, 8, raw=True, normed=True, codes=FP8),
    "decode fp8 raw, unscaled outputs": decode(128, 128, 16, raw=True, codes=FP8, unscaled=True),
    "decode fp8 raw, up to 8 tokens": decode(128, 128, 2, raw=True, codes=FP8, new=8),
    "decode fp8 raw, up to 16 tokens": decode(64, 64, 16, True, raw=True, codes=FP8, new=16),
    "decode fp8 raw 256, normed, special": decode(256, 256, 4, True, True, True, codes=FP8),
    "decode fp8 raw with sinks, interleaved, LayerNorm": decode(
        *(128, 128, 8, True),
        raw=True,
        codes=FP8,
        sinks=True,
        chunked=True,
        rotation={"INTERLEAVED": True, "NORM": "layer", "PER_HEAD": True, "ROTATED": 64},
    ),
    "decode int8 raw": decode(128, 128, 2, raw=True, codes="*i8"),
    "decode int8 raw, up to 16 tokens, normed": decode(
        128, 128, 4, raw=True, normed=True, codes="*i8", new=16
    ),
    "decode int8 raw without rotation": decode(
        96, 128, 16, raw=True, codes="*i8", rotation={"ROTATED": 0}
    ),
    "prefill 64": prefill(64, 64),
    "prefill 128": prefill(128, 128),
    "prefill 128 special": prefill(128, 128, True),
    "prefill 128 in chunks": prefill(128, 128, True, chunked=True),
    "prefill 256": prefill(256, 256),
    "prefill 512": prefill(512, 512),
    "prefill fp8 64": prefill(64, 64, codes=FP8),
    "prefill fp8": prefill(128, 128, codes=FP8),
    "prefill fp8 special": prefill(128, 128, True, FP8),
    "prefill fp8 256": prefill(256, 256, codes=FP8),
    "prefill fp8 fresh": prefill(128, 128, codes=FP8, fresh=True),
    "prefill fp8 fresh special": prefill(64, 64, True, FP8, fresh=True),
    "prefill int8": prefill(128, 128, codes="*i8"),
    "skinny few": skinny_gemm(16, 32, False, 8),
    "skinny split": skinny_gemm(16, 64, True, 4),
    "skinny many": skinny_gemm(64, 128, True, 3),
    "one row": one_row(),
    "one row that leaves a norm": one_row(leaves=True),
    "one row that takes and leaves a norm": one_row(takes=True, leaves=True),
    "one row, gated, that takes a norm": one_row(takes=True, gated=True),
    "one row of fp8 weights": one_row(fp8=True),
    "gated few": gated(16, 64, 4),
    "gated many": gated(64, 64, 4),
    "gated many wide": gated(64, 128, 2),
    "wide": (
        wide.wide_linear_kernel,
        {
            **dict.fromkeys(("x", "weight"), "tensordesc<bf16[128,64]>"),
            "out": "tensordesc<bf16[128,128]>",
            **dict.fromkeys(("M", "N", "K"), "i32"),
        },
        {"ROWS": 128, "OUTPUTS": 128, "BLOCK_K": 64, "GROUP": 8},
        {"num_warps": 8, "num_stages": 4},
    ),
    "threshold": (sample.sample_threshold_kernel, SAMPLE, {"TILE": 2048}, {"num_warps": 8}),
    "split": (sample.sample_split_kernel, SPLIT, {"SPLITS": 8, "TILE": 2048}, {}),
    "join": (sample.sample_join_kernel, JOIN, {"SPLITS": 8}, {"num_warps": 1}),
    "change logits": (logits.change_logits_kernel, CHANGE, {"TILE": 1024}, {"num_warps": 4}),
    "gather blocks": (block_copy.copy_blocks_kernel, BLOCKS, {"SCATTER": False, "TILE": 1024}, {}),
    "scatter blocks": (block_copy.copy_blocks_kernel, BLOCKS, {"SCATTER": True, "TILE": 1024}, {}),
    "count tokens": (logits.count_tokens_kernel, COUNT, {}, {"num_warps": 1}),
    **LORA_AND_SPECULATION,
    **EXPERTS,
    **LATENT,
    **CHUNKS,
    **RECURRENT,
    **GLUON,
    "inputs": (sample.decode_inputs_kernel, INPUTS, {"SIZE": 16}, {"num_warps": 1}),
}


# One case of each kernel, with few instructions: compiled for every GPU. `make test-compile` compiles all.
QUICK = (
    "all_reduce",
    "rms_norm",
    "add_rms_norm",
    "qk_norm",
    "silu_mul in planes",
    "quantise rows",
    "quantise blocks",
    "quantise to int8",
    "int8 GEMM, groups of 32",
    "dequantise",
    "int8 GEMM",
    "codebook GEMM with sub-scales",
    "dequantise a codebook",
    "fp8 GEMM that quantises",
    "fp8 gated",
    "one row, gated, that takes a norm",
    "int4 GEMM of one row",
    "rope_write",
    "decode 128",
    "prefill 64",
    "skinny few",
    "gated few",
    "wide",
    "threshold",
    "split",
    "join",
    "change logits",
    "count tokens",
    "gather blocks",
    "inputs",
    "lora shrink",
    "lora expand",
    "lora expand, gated",
    "lora expand, norm",
    "lora shrink of a tile",
    "lora expand of a tile",
    "lora shrink, int8",
    "medusa block, 16 rows",
    "medusa scores, 16 rows",
    "medusa join",
    "typical",
    "verify inputs, 0 siblings",
    "keep, 0 siblings",
    "write next, 0 siblings",
    "adopt",
    "eagle inputs",
    "eagle select",
    "eagle advance",
    "route, softmax",
    "sort pairs",
    "combine experts",
    "quantise inputs of experts",
    "mxfp4 experts, down, plan 0",
    "latent write",
    "latent absorbed queries",
    "latent decode of 16 heads",
    "latent prefill of 16 heads with little shared memory",
    "chunk attention 64",
    "gather",
    "causal conv of single tokens",
    "selective scan of single tokens",
    "delta rule of single tokens",
    "gated norm",
    "wide int4 GEMM of 32 rows",
    "int4 GEMM of many rows, split",
    "Hopper attention 128 of cached tokens",
)
# Tilings that the code chooses only with so much shared memory.
NEEDS_SHARED = dict.fromkeys(
    ("latent prefill of 16 heads", "latent prefill of 128 heads"), latent._PREFILL_BYTES
)
GPUS = tuple(Gpu(each) for each in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)))
ALL = os.environ.get("WINDLASS_COMPILE_ALL") == "1"


def refused(case: Case, gpu: Gpu) -> str | None:
    """Why the code does not choose a kernel on this GPU, or None."""
    if is_gluon(case):
        return gpu.lacks_warpgroups()
    return gpu.lacks_fp8() if needs_fp8(case) else gpu.lacks_triton()


def launched() -> Iterator[tuple[str, JITFunction]]:
    """Every kernel of the package with its name."""
    for module in pkgutil.iter_modules(kernels.__path__):
        found = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        for name, kernel in found.items():
            if isinstance(kernel, JITFunction):
                yield f"{module.name}.{name}", kernel


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        pytest.param(name, gpu, id=f"{name} on {gpu.arch}")
        for gpu in GPUS
        for name in (CASES if ALL else QUICK)
        if refused(CASES[name], gpu) is None and gpu.shared_bytes >= NEEDS_SHARED.get(name, 0)
    ],
)
def test_compiles_without_spills(name: str, gpu: Gpu, request: pytest.FixtureRequest) -> None:
    cache = request.config.cache
    assert cache is not None
    found = compiled(CASES[name], gpu, cache.mkdir("compiled-kernels"))
    assert found.shared <= gpu.shared_bytes, f"with {found.stages} stages"
    if gpu == MEASURED:
        assert found.stages is None
        assert found.stack <= MAY_SPILL.get(name, 0), f"{name} spills {found.stack} bytes"


def test_every_kernel_is_compiled_for_every_gpu() -> None:
    quick = {CASES[name][0] for name in QUICK}
    assert len(quick) == len(QUICK)
    for name, kernel in launched():
        if name.endswith("_kernel"):
            assert kernel in quick, f"{name} has no case in QUICK"


def test_gpus_refuse_what_they_lack() -> None:
    fp8, gluon = CASES["fp8 GEMM"], CASES["wide int4 GEMM of 32 rows"]
    assert [refused(fp8, gpu) for gpu in GPUS[1:]] == [None] * 4
    assert "fp8 tensor cores need compute capability 8.9" in str(refused(fp8, GPUS[0]))
    assert [gpu.arch for gpu in GPUS if refused(gluon, gpu) is None] == ["sm_90"]


def test_parameter_names_do_not_collide_with_the_launcher() -> None:
    """Triton's generated launcher has locals of its own; a parameter of that name gets their value."""
    taken = {"params", "specialization", "options"}
    for name, kernel in launched():
        assert not taken & set(kernel.arg_names), name
