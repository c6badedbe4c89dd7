"""Compile cases of the attention of long prompt chunks."""

from __future__ import annotations

from windlass.kernels.triton import chunk_attention

X, F, I = "*bf16", "*fp32", "*i32"  # noqa: E741


def attend(dim: int, *, rope: int = 0, value: int = 0, **options: bool) -> tuple:
    cached, capped, sinks = (options.get(name, False) for name in ("cached", "capped", "sinks"))
    launch = chunk_attention.tiling(dim, rope, capped)
    constants = {key: launch.pop(key) for key in ("ROWS", "TILE")}
    value, tile = value or dim, constants["TILE"]
    constants |= {"NUM_Q": 32, "GROUP": 1 if rope else 4, "DIM": dim, "ROPE": rope, "VALUE": value}
    constants |= {"CACHED": cached, "CAPPED": capped}
    signature = {"q": X, "out": X, "tiles": I, "num_keys": "i32", "scale": "fp32", "cap": "fp32"}
    signature |= {"keys": _tiles(tile, dim), "values": _tiles(tile, value)}
    strides = ("q_token", "q_head", "rope_token", "rope_head", "key_head", "value_head")
    signature |= dict.fromkeys(strides, "i32")
    if rope:
        signature |= {"q_rope": X, "rope_keys": _tiles(tile, rope)}
    if cached:
        signature["sums"] = F
    if sinks:
        signature["sinks"] = F
    return chunk_attention.chunk_attention_kernel, signature, constants, launch


def _tiles(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows},{columns}]>"


def gather(codes: str | None) -> tuple:
    signature = {"pages": codes or X, "table": I, "out": X, "first": "i32", "num_tokens": "i32"}
    if codes is not None:
        signature["scales"] = F
    constants = {"NUM_KV": 8, "DIM": 128, "DIM_PAD": 128, "SIZE": 16, "STRIDE": 128, "TOKENS": 16}
    return chunk_attention.gather_kernel, signature, constants, {"num_warps": 4}


CHUNKS = {
    "chunk attention 64": attend(64),
    "chunk attention 128": attend(128),
    "chunk attention 128 of cached tokens": attend(128, cached=True),
    "chunk attention 128 capped with sinks": attend(128, capped=True, sinks=True),
    "chunk attention of MLA": attend(128, rope=64),
    "chunk attention of MLA of cached tokens": attend(128, rope=64, cached=True),
    "gather": gather(None),
    "gather fp8": gather("*fp8e4nv"),
}
