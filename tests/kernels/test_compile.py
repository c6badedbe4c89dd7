"""Every Triton kernel compiles for sm_90 without a GPU, and spills no registers."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

from tests.kernels.chunk_cases import CHUNKS  # noqa: E402
from tests.kernels.compile_cases import LORA_AND_SPECULATION  # noqa: E402
from tests.kernels.expert_cases import EXPERTS  # noqa: E402
from tests.kernels.gluon_cases import GLUON  # noqa: E402
from tests.kernels.latent_cases import LATENT  # noqa: E402
from tests.kernels.mamba_cases import MAMBA  # noqa: E402
from windlass.kernels import triton as kernels  # noqa: E402
from windlass.kernels.triton import (  # noqa: E402
    all_reduce,
    attention,
    attention_kernels,
    block_copy,
    eight_bit,
    fp8_kernels,
    grouped,
    logits,
    norm,
    rope,
    sample,
    skinny,
    table,
    wide,
)

HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
X, F, I, L = "*bf16", "*fp32", "*i32", "*i64"  # noqa: E741
FP8 = "*fp8e4nv"
ALIGNED = (
    *("N", "K", "K_PAD", "N0", "N1", "N2", "span"),
    *("table_stride", "stride", "width", "size", "words"),
    *(
        "q_stride",
        "latent_stride",
        "rotated_token",
        "rotated_head",
        "q_token",
        "q_head",
        "rope_token",
        "rope_head",
        "key_head",
        "value_head",
        "x_row",
        "x_head",
        "w_head",
        "w_in",
        "w_out",
        "out_row",
        "out_head",
    ),
)
MAX_SHARED_BYTES = 227 * 1024  # per program
# Accumulators of 128 rows by 256 dimensions fill the registers; the inner loop does not spill.
MAY_SPILL = {"prefill fp8 256": 256}

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
    **dict.fromkeys(("x", "weight", "out", "residual", "gains", "normed"), X),
    **{"eps": "fp32", "M": "i32", "N": "i32", "K": "i32", "prefetched": "i32"},
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
    wide: bool = False,
    siblings: int = 0,
    sinks: bool = False,
    rotation: dict[str, object] | None = None,
) -> tuple:
    heads = {"NUM_Q": 32, "NUM_KV": 8, "GROUP": 4, "DIM": dim, "DIM_PAD": pad, "SIZE": 16}
    heads["STRIDE"] = 8 * 16
    flags = {"SPLITS": splits, "ALL_SINGLES": True, "WINDOWED": special, "CAPPED": special}
    flags = {**flags, "RAW": raw, "WIDE": wide, "SIBLINGS": siblings}
    flags = {**flags, "ROTATED": dim if raw else 0, "NORM": "rms" if normed else None}
    flags = {**flags, "INTERLEAVED": False, "PER_HEAD": False, **(rotation or {})}
    options = attention._decode_options(pad, splits, codes is not None)
    constants = {key: options.pop(key) for key in ("TILE", "MIN_TILES")}
    base = DECODE if flags["ROTATED"] or not raw else without(DECODE, "cos_sin")
    signature, scales = paged({**base, "sinks": F} if sinks else base, codes)
    constants = {**heads, **flags, **constants, **scales}
    return attention_kernels.paged_decode_kernel, signature, constants, options


def prefill(
    dim: int,
    pad: int,
    special: bool = False,
    codes: str | None = None,
    fresh: bool = False,
    sinks: bool = False,
) -> tuple:
    heads = {"NUM_Q": 32, "NUM_KV": 8, "GROUP": 4, "GROUP_PAD": 4, "DIM": dim, "DIM_PAD": pad}
    flags = {
        "SIZE": 16,
        "STRIDE": 8 * 16,
        "ROWS": 128,
        "WINDOWED": special,
        "CAPPED": special,
        "BATCH_INVARIANT": False,
    }
    options = attention._prefill_options(pad, codes is not None and not fresh)
    flags["TILE"] = options.pop("TILE")
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


def skinny_gemm(rows: int, outputs: int, split: bool, stages: int, norm_rows: int = 0) -> tuple:
    signature = {**GEMM, "partial_sums": F, "counters": I, "splits": "i32"}
    constants = {"SPLIT": split, "ROWS": rows, "OUTPUTS": outputs, "BLOCK_K": 128}
    constants = {**constants, "NORM_ROWS": norm_rows, "WIDTH": 4096 if norm_rows else 1}
    return skinny.skinny_linear_kernel, signature, constants, {"num_stages": stages}


def fp8_gemm(quantised: bool, even: bool, split: bool, norm_rows: int = 0) -> tuple:
    signature = {
        **GEMM,
        "partial_sums": F,
        "counters": I,
        "splits": "i32",
        "codes": FP8,
        "scales": F,
    }
    constants = {"SPLIT": split, "ROWS": 16, "OUTPUTS": 64, "BLOCK_K": 128, "EVEN": even}
    constants = {**constants, "NORM_ROWS": norm_rows, "WIDTH": 4096 if norm_rows else 1}
    if quantised:
        signature = {**signature, "x": FP8, "x_scales": F}
    if norm_rows:
        signature = {**signature, "normed": FP8, "normed_scales": F}
    return (
        fp8_kernels.fp8_linear_kernel,
        signature,
        constants,
        {"num_stages": 6 if quantised else 4},
    )


def fp8_gated(quantised: bool) -> tuple:
    signature = {**GEMM, "codes": FP8, "scales": F}
    if quantised:
        signature = {**signature, "x": FP8, "x_scales": F}
    constants = {"ROWS": 16, "OUTPUTS": 64, "BLOCK_K": 128, "EVEN": True}
    return fp8_kernels.fp8_gated_kernel, signature, constants, {"num_stages": 3 if quantised else 4}


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


def summed(two_shot: bool, normed: bool) -> tuple:
    signature = {"x": X, "out": X, "eps": "fp32", "buffers": L, "counters": I, "rank": "i32"}
    if normed:
        signature |= {"residual": X, "weight": X, "out": FP8, "out_scales": F}
    sizes = {"SIZE": 8192, "WIDTH": 8192, "ROWS": 256, "SLOT": 32768}
    constants = {"RANKS": 8, "LANES": 8, "TWO_SHOT": two_shot, **sizes}
    return all_reduce.all_reduce_kernel, signature, constants, {"num_warps": 16}


CASES = {
    "all_reduce": summed(False, False),
    "all_reduce with a norm, quantised": summed(False, True),
    "all_reduce, two-shot": summed(True, False),
    "all_reduce, two-shot, with a norm": summed(True, True),
    "rms_norm": (
        norm.rms_norm_kernel,
        {**NORM, "stride": "i32"},
        {"SIZE": 4096, "WIDTH": 4096},
        {},
    ),
    "add_rms_norm": (
        norm.add_rms_norm_kernel,
        {**NORM, "residual": X},
        {"SIZE": 576, "WIDTH": 1024},
        {},
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
    "int4 GEMM": grouped_gemm(4, 128, 128, 8),
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
    "fp8 GEMM with a norm": fp8_gemm(True, True, True, norm_rows=1),
    "fp8 GEMM that quantises": fp8_gemm(False, True, True),
    "fp8 GEMM that quantises, odd, with a norm": fp8_gemm(False, False, False, norm_rows=1),
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
        wide=True,
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
    "decode 256": decode(256, 256, 4),
    "decode raw": decode(128, 128, 2, raw=True),
    "decode raw normed": decode(64, 64, 8, raw=True, normed=True),
    "decode raw wide": decode(64, 64, 8, raw=True, wide=True),
    "decode raw with siblings": decode(64, 64, 8, raw=True, wide=True, siblings=2),
    "decode fp8": decode(128, 128, 1, codes=FP8),
    "decode fp8 special": decode(96, 128, 8, True, codes=FP8),
    "decode fp8 256": decode(256, 256, 4, codes=FP8),
    "decode fp8 raw": decode(128, 128, 2, raw=True, codes=FP8),
    "decode fp8 raw normed": decode(64, 64, 8, raw=True, normed=True, codes=FP8),
    "decode int8 raw": decode(128, 128, 2, raw=True, codes="*i8"),
    "prefill 64": prefill(64, 64),
    "prefill 128": prefill(128, 128),
    "prefill 128 special": prefill(128, 128, True),
    "prefill 256": prefill(256, 256),
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
    "skinny with a norm": skinny_gemm(16, 32, False, 4, norm_rows=1),
    "skinny split with a norm": skinny_gemm(16, 32, True, 4, norm_rows=1),
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
    **MAMBA,
    **GLUON,
    "inputs": (sample.decode_inputs_kernel, INPUTS, {"SIZE": 16}, {"num_warps": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    function, signature, constants, options = CASES[name]
    names = function.arg_names
    full = {key: signature.get(key, "constexpr") for key in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(names)
        if full[key].startswith("*") or key in ALIGNED
    }
    # A pointer that is not in the signature is None.
    absent = {key: None for key, kind in full.items() if kind == "constexpr"}
    constants = {**absent, **constants}
    if "PDL" in names:
        constants["PDL"] = True
        options = {**options, "launch_pdl": True}
    values = {(names.index(key),): value for key, value in constants.items()}
    make = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    source = make(function, full, constexprs=values, attrs=aligned)
    kernel = triton.compile(source, target=HOPPER, options=options)
    assert kernel.metadata.shared <= MAX_SHARED_BYTES
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = shutil.which("cuobjdump", path=str(TOOLS))
    assert tool is not None
    report = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    assert int(found.group(2)) <= MAY_SPILL.get(name, 0), f"{name} spills {found.group(2)} bytes"


def test_parameter_names_do_not_collide_with_the_launcher() -> None:
    """Triton's generated launcher has locals of its own; a parameter of that name gets their value."""
    taken = {"params", "specialization", "options"}
    for module in pkgutil.iter_modules(kernels.__path__):
        found = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        for name, kernel in found.items():
            if isinstance(kernel, JITFunction):
                assert not taken & set(kernel.arg_names), f"{module.name}.{name}"
