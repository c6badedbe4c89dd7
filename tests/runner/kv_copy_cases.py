"""KV caches of every layout, to copy blocks of."""

from __future__ import annotations

import torch

from windlass.core.kv_layout import KVLayout
from windlass.kernels.batch import KVCache, attention_layout, latent_layout

NUM_BLOCKS = 11


def _attention(
    dtype: torch.dtype, windows: tuple[int | None, ...] = (None, None, None)
) -> KVLayout:
    return attention_layout(windows, num_kv_heads=3, dim=10, block_size=4, dtype=dtype)


# Layout and dtype of the pages; sizes that no power of two divides.
LAYOUTS: dict[str, tuple[KVLayout, torch.dtype]] = {
    "float32": (_attention(torch.float32), torch.float32),
    "bf16": (_attention(torch.bfloat16), torch.bfloat16),
    "fp16": (_attention(torch.float16), torch.float16),
    "fp8 with scales": (_attention(torch.float8_e4m3fn), torch.float8_e4m3fn),
    "int8 with scales": (_attention(torch.int8), torch.int8),
    "windows": (_attention(torch.bfloat16, (None, 8, 8, None, 8)), torch.bfloat16),
    "windows of codes": (_attention(torch.int8, (None, 8, 8)), torch.int8),
    "latent": (latent_layout(3, dim=9, block_size=5, dtype=torch.float16), torch.float16),
    "latent of codes": (latent_layout(3, dim=9, block_size=5, dtype=torch.int8), torch.int8),
    "states": (
        attention_layout(
            (None,) * 4,
            num_kv_heads=1,
            dim=8,
            block_size=2,
            dtype=torch.float16,
            states={0: 30, 2: 30, 3: 30},
        ),
        torch.float16,
    ),
    "a stage": (
        _attention(torch.bfloat16, (None, 8, 8, None, 8)).stage(range(1, 3)),
        torch.bfloat16,
    ),
    "a TP rank": (
        attention_layout((None,), num_kv_heads=1, dim=3, block_size=1, dtype=torch.int8),
        torch.int8,
    ),
}


def make_cache(name: str, device: str = "cpu", *, seed: int = 0) -> KVCache:
    """A cache of random bytes."""
    layout, dtype = LAYOUTS[name]
    cache = KVCache(layout, NUM_BLOCKS, dtype, torch.device(device))
    random = torch.Generator().manual_seed(seed)
    for pages in cache.planes():
        bits = torch.randint(256, pages.shape, dtype=torch.uint8, generator=random)
        pages.copy_(bits)
    return cache


def snapshot(cache: KVCache) -> list[torch.Tensor]:
    """The bytes of all pages, [planes, blocks, bytes] per tensor, on the host."""
    return [pages.clone().cpu() for pages in cache.planes()]
