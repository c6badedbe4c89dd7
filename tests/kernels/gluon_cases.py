"""Signatures and constants of Gluon kernels, for test_compile.py."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from windlass.kernels.triton import int4_wide

_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "u8": gl.uint8}


def box(kind: str, rows: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, 64], _TYPES[kind])
    return f"tensordesc<{kind}[{rows},64],{layout!r}>"


def int4(
    rows: int, dtype: str = "bf16", scales: str = "*fp16", group: int = 128, split: bool = False
) -> tuple:
    signature = {
        "inputs": box(dtype, rows),
        "weight": box("u8", 64),
        **dict.fromkeys(("scales", "offsets"), scales),
        "out": f"*{dtype}",
        "partial_sums": "*fp32",
        "counters": "*i32",
        **dict.fromkeys(("M", "N", "K_PAD", "splits"), "i32"),
    }
    stages = 4 if rows <= 32 else 3
    constants = {"GROUP": group, "HALF": min(group, 128), "STAGES": stages, "SPLIT": split}
    return int4_wide.int4_wide_kernel, signature, constants, {"num_warps": 4}


GLUON = {
    "wide int4 GEMM of 32 rows": int4(32, split=True),
    "wide int4 GEMM of 64 rows": int4(64, scales="*bf16"),
    "wide int4 GEMM of 128 rows": int4(128, split=True),
    "wide int4 GEMM of 128 rows in float16": int4(128, "fp16"),
    "wide int4 GEMM of groups of 64": int4(128, group=64),
    "wide int4 GEMM of one group": int4(64, scales="*fp32", group=4096),
}
