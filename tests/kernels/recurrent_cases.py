"""Compile cases of recurrent layers, with the sizes of Granite 4 H Tiny, Qwen3-Next, LFM2 1.2B,
Nemotron Nano 9B v2 and Falcon-H1 1.5B."""

from __future__ import annotations

from windlass.kernels.triton import delta, mamba, recurrent

X, F, I = "*bf16", "*fp32", "*i32"  # noqa: E741
_ROWS = {
    **dict.fromkeys(("rows", "positions", "token_slots", "tables"), I),
    **dict.fromkeys(("table_stride", "page_stride", "num_tokens", "width"), "i32"),
}
_CONV = {**dict.fromkeys(("projected", "out"), X), "weight": F, "bias": F, "pages": F, **_ROWS}
_SCAN = {
    **dict.fromkeys(("projected", "mixed", "out"), X),
    **dict.fromkeys(("decay", "skip", "dt_bias", "pages"), F),
    **_ROWS,
}
_DELTA = {
    **dict.fromkeys(("projected", "mixed", "out"), X),
    **dict.fromkeys(("decay", "dt_bias", "pages"), F),
    **_ROWS,
    **dict.fromkeys(("scale", "unit_eps"), "fp32"),
}


def _conv(tiles: bool, gated: bool = False) -> tuple:
    sizes = {"FIRST": 3072, "CHANNELS": 3328, "CONV": 4, "STATE_AT": 3072 * 128, "SIZE": 1024}
    if gated:
        sizes = {"FIRST": 4096, "CHANNELS": 2048, "CONV": 3, "STATE_AT": 0, "SIZE": 16}
    flags = {"BLOCK": recurrent._CHANNELS, "TILES": tiles, "GATED": gated}
    constants = {**sizes, "TOKENS": recurrent._CONV_TOKENS if tiles else 1, **flags}
    return recurrent.causal_conv_kernel, _CONV, constants, {"num_warps": 4 if tiles else 1}


_GRANITE = {"HEADS": 48, "DIM": 64, "GROUPS": 1, "STATE": 128, "SIZE": 1024}
_NEMOTRON = {"HEADS": 128, "DIM": 80, "GROUPS": 8, "STATE": 128, "SIZE": 4096}
_FALCON = {"HEADS": 48, "DIM": 64, "GROUPS": 1, "STATE": 256, "SIZE": 2048}


def _scan(tiles: bool, pieces: bool, sizes: dict[str, int] = _GRANITE) -> tuple:
    features, (tokens, warps) = (
        mamba.features_of(sizes["DIM"]),
        mamba.piece_and_warps(sizes["STATE"]),
    )
    flags = {"TILES": tiles, "PIECES": pieces, "FEATURES": features}
    constants = {**sizes, **flags, "TOKENS": tokens if tiles else 1}
    return mamba.selective_scan_kernel, _SCAN, constants, {"num_warps": warps}


def _delta(tiles: bool) -> tuple:
    sizes = {"HEADS": 32, "DIM": 128, "GROUPS": 16, "STATE": 128, "SIZE": 2048, "TILED": False}
    tokens = delta._TOKENS if tiles else 1
    constants = {**sizes, "TOKENS": tokens, "FEATURES": delta._FEATURES, "TILES": tiles}
    return delta.delta_rule_kernel, _DELTA, constants, {"num_warps": 4}


RECURRENT = {
    "causal conv of rows": _conv(True),
    "causal conv of single tokens": _conv(False),
    "short conv of rows": _conv(True, gated=True),
    "short conv of single tokens": _conv(False, gated=True),
    "selective scan of pieces": _scan(True, True),
    "selective scan, batch-invariant": _scan(True, False),
    "selective scan of single tokens": _scan(False, False),
    **{
        f"selective scan of {name}, {what}": _scan(tiles, pieces, sizes)
        for name, sizes in (("Nemotron Nano 2", _NEMOTRON), ("Falcon-H1", _FALCON))
        for what, tiles, pieces in (
            ("pieces", True, True),
            ("batch-invariant", True, False),
            ("single tokens", False, False),
        )
    },
    "delta rule of rows": _delta(True),
    "delta rule of single tokens": _delta(False),
    "gated norm": (
        delta.gated_norm_kernel,
        {"y": X, "projected": X, "weight": F, "width": "i32", "eps": "fp32"},
        {"HEADS": 32, "DIM": 128, "BLOCK": delta._HEADS},
        {"num_warps": 4},
    ),
}
