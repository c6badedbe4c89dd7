"""Signatures and constants of Gluon kernels, for test_compile.py."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from windlass.kernels.triton import hopper_attention, int4_many, int4_wide

_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "u8": gl.uint8}


def box(kind: str, rows: int, columns: int = 64) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[kind])
    return f"tensordesc<{kind}[{rows},{columns}],{layout!r}>"


def int4(
    rows: int,
    dtype: str = "bf16",
    scales: str = "*fp16",
    group: int = 128,
    split: bool = False,
    boxes: int = 2,
) -> tuple:
    signature = {
        "inputs": box(dtype, rows // boxes),
        "weight": box("u8", 64),
        **dict.fromkeys(("scales", "offsets"), scales),
        "out": f"*{dtype}",
        "partial_sums": "*fp32",
        "counters": "*i32",
        **dict.fromkeys(("M", "N", "K_PAD", "splits"), "i32"),
    }
    stages = 4 if rows <= 32 else 3
    constants = {
        "ROWS": rows,
        "GROUP": group,
        "HALF": min(group, 128),
        "STAGES": stages,
        "SPLIT": split,
    }
    return int4_wide.int4_wide_kernel, signature, constants, {"num_warps": 4}


def int4_many_rows(scales: str = "*fp16", group: int = 128, split: bool = False) -> tuple:
    _, signature, constants, options = int4(256, scales=scales, group=group, split=split)
    signature["inputs"] = signature["result"] = box("bf16", 256)
    del constants["ROWS"]
    constants |= {"STAGES": 3, "CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    return int4_many.int4_many_kernel, signature, constants, options


def attend(dim: int, *, rope: int = 0, dtype: str = "bf16", **options: bool) -> tuple:
    signature = {"q": box(dtype, 64, dim), "keys": box(dtype, 128, dim)}
    signature |= {"values": box(dtype, 128, dim), "out": f"*{dtype}", "tiles": "*i32"}
    signature |= {"num_keys": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(("q_head", "rope_head", "key_head", "value_head"), "i32")
    if rope:
        signature |= {"q_rope": box(dtype, 64, rope), "rope_keys": box(dtype, 128, rope)}
    cached = options.get("cached", False)
    if cached or options.get("resumed"):
        signature["sums"] = "*fp32"
    if options.get("sinks"):
        signature["sinks"] = "*fp32"
    constants = {"NUM_Q": 32, "GROUP": 1 if rope else 4, "CACHED": cached, "STAGES": 2}
    constants |= {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
    return hopper_attention.hopper_attention_kernel, signature, constants, {"num_warps": 4}


GLUON = {
    "wide int4 GEMM of 32 rows": int4(32, split=True),
    "wide int4 GEMM of 64 rows": int4(64, scales="*bf16"),
    "wide int4 GEMM of 128 rows": int4(128, split=True),
    "wide int4 GEMM of 128 rows in float16": int4(128, "fp16"),
    "wide int4 GEMM of 128 rows that fill a tile": int4(128, boxes=1),
    "wide int4 GEMM of one group": int4(64, scales="*fp32", group=4096),
    "int4 GEMM of many rows": int4_many_rows(),
    "int4 GEMM of many rows, split": int4_many_rows(split=True, scales="*bf16"),
    "int4 GEMM of many rows and groups of 64": int4_many_rows(group=64),
    "Hopper attention 128": attend(128),
    "Hopper attention 128 of cached tokens": attend(128, cached=True),
    "Hopper attention 128 behind cached tokens": attend(128, resumed=True, dtype="fp16"),
    "Hopper attention 64 with sinks": attend(64, sinks=True),
    "Hopper attention of MLA": attend(128, rope=64, resumed=True),
}
