"""The steps before the first request launch the kernels that later steps launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from windlass.core.types import Row, SlotId, StepPlan
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV
from windlass.runner.cuda.decode import graph_sizes
from windlass.runner.cuda.metadata import DeviceMetadata
from windlass.runner.cuda.mixed import mixed_sizes
from windlass.runner.eager import step_batch
from windlass.runner.inputs import SlotFacts, StepInputs
from windlass.runner.slots import SlotTables
from windlass.runner.warmup import WarmUp, warmup_plans

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windlass.kernels.triton import attention, chunk_attention, int4_many, int4_wide, rope
from windlass.kernels.triton.int4_hopper import Int4HopperGemm
from windlass.kernels.triton.int4_wide import Int4Weight
from windlass.kernels.triton.reduce import SplitWorkspace

CPU, BLOCK, SLOTS = torch.device("cpu"), 16, 40
HEADS = Heads(4, 2, 64)
Variant = tuple[str, tuple[bool, ...], tuple[tuple[str, Any], ...]]


def warm_up(**changed: int) -> WarmUp:
    sizes = {"max_tokens": 8192, "max_rows": 40, "max_positions": 16384} | changed
    return warmup_plans(**sizes, slot=SlotId(SLOTS))


def plans(**changed: int) -> list[StepPlan]:
    return warm_up(**changed).smallest_first


@pytest.mark.parametrize("max_tokens", [1, 3, 512, 1023, 1024, 1025, 3000, 8192])
@pytest.mark.parametrize("max_positions", [1, 2, 300, 4096, 131072])
def test_rows_fit(max_tokens: int, max_positions: int) -> None:
    steps = warm_up(max_tokens=max_tokens, max_positions=max_positions)
    found = [*steps.smallest_first, steps.cached]
    assert max(plan.num_tokens for plan in found) == max_tokens
    for plan in found:
        assert 0 < plan.num_tokens <= max_tokens
        for row in plan.rows:
            assert (row.slot, row.blocks) == (SLOTS, ())
            assert len(row.tokens) == row.num_tokens
            assert row.start + row.num_tokens <= max_positions or row.num_tokens <= 2


def test_sizes() -> None:
    numbers = [(plan.num_tokens, sum(row.num_tokens == 1 for row in plan.rows)) for plan in plans()]
    *others, largest = numbers
    assert largest == (8192, 0)
    assert others[:3] == [(1024, 1), (2048, 1), (4096, 1)]
    assert others[3:] == [(1024, 2), (1024, 4), (1024, 8), (1024, 16), (1024, 32), (1024, 40)]
    cached = [max(row.start for row in plan.rows) for plan in plans()]
    assert cached == [4 * 1021, *[0] * 9]
    assert (warm_up().cached.num_tokens, warm_up().cached.rows[-1].start) == (8192, 16384 - 8189)


class Launches:
    """Stands for a kernel, and records its variants instead of computing."""

    def __init__(self, kernel: Any, variants: set[Variant]) -> None:
        self._kernel, self._variants = kernel, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(grid)
        return self._record

    def _record(self, *args: Any, **constants: Any) -> None:
        missing = tuple(arg is None for arg in args)
        self._variants.add((self._kernel.__name__, missing, tuple(sorted(constants.items()))))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """The variants of attention kernels that were launched."""
    found: set[Variant] = set()
    for module in (attention, chunk_attention):
        monkeypatch.setattr(module, "fit", lambda kernel: Launches(kernel, found))
    for module, name in ((chunk_attention, "gather_kernel"), (rope, "rope_write_kernel")):
        monkeypatch.setattr(module, name, Launches(getattr(module, name), found))
    return found


def attend(plan: StepPlan, kv_dtype: torch.dtype) -> None:
    """Launch the attention of one layer in an eager step."""
    slots = SlotTables(SLOTS, 1024, BLOCK, CPU)
    tile = attention.tile_tokens(HEADS.group)
    metadata = DeviceMetadata(
        slots, tile=tile, num_kv_heads=HEADS.num_kv, num_positions=1, multiprocessors=132
    )
    pages = torch.empty(2, 1, HEADS.num_kv, BLOCK, HEADS.dim, dtype=kv_dtype)
    scales = [torch.empty(pages.shape[1:4])] * 2 if kv_dtype == torch.int8 else []
    kv = LayerKV(*pages, *scales)
    _, batch = step_batch(StepInputs(plan, SlotFacts(), []), slots, [kv], metadata)
    num_heads = HEADS.num_q + 2 * HEADS.num_kv
    qkv = torch.empty(plan.num_tokens, num_heads * HEADS.dim, dtype=torch.bfloat16)
    attention.attend(qkv, HEADS, RopeOptions(None), kv, batch, AttentionOptions(0.1))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_start_compiles_the_attention_of_large_steps(
    kv_dtype: torch.dtype, variants: set[Variant]
) -> None:
    for plan in plans():
        attend(plan, kv_dtype)
    compiled = set(variants)
    names = Counter(name for name, *_ in compiled)
    assert names["gather_kernel"] == 1
    assert names["chunk_attention_kernel"] == 3  # of cached tokens; own tokens after them, or alone
    assert names["paged_decode_kernel"] > 1  # by the number of splits
    assert {"paged_prefill_kernel", "rope_write_kernel"} < names.keys()
    variants.clear()
    random = Random(1)
    for num_decodes in (0, *range(1, SLOTS)):
        chunks = [(random.choice([0, 16, 5000]), random.choice([2, 100, 700])) for _ in range(3)]
        chunks.append((random.choice([0, 48]), 1024))
        rows = [(random.randrange(9000), 1) for _ in range(num_decodes)] + chunks
        attend(StepPlan([row_of(start, count) for start, count in rows]), kv_dtype)
    assert variants <= compiled
    assert len(variants) > 5


def row_of(start: int, num_tokens: int) -> Row:
    return Row("", SlotId(0), start, num_tokens, (0,) * num_tokens, (), sample=True)


@pytest.mark.parametrize("shape", [(28672, 4096), (4096, 14336), (6144, 4096), (49152, 2048)])
def test_a_start_compiles_the_int4_gemms_of_every_step(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs have the numbers of tokens of small steps, and decode graphs those of few rows."""
    compiled = set[Variant]()
    for module, name in ((int4_many, "int4_many_kernel"), (int4_wide, "int4_wide_kernel")):
        monkeypatch.setattr(module, name, Launches(getattr(module, name), compiled))
    monkeypatch.setattr(TensorDescriptor, "from_tensor", lambda *args: args[1])
    weight = Int4Weight(
        torch.empty(shape[0], shape[1] // 2, dtype=torch.uint8, device="meta"),
        *[torch.empty(shape[1] // 128, shape[0], device="meta")] * 2,
        group=128,
        half=128,
    )
    gemm = Int4HopperGemm(weight, SplitWorkspace())

    def launch(num_tokens: int) -> None:
        gemm.apply(torch.empty(num_tokens, shape[1], dtype=torch.bfloat16, device="meta"))

    captured = [*graph_sizes(256), *mixed_sizes(8192)]
    for num_tokens in (*captured, *(plan.num_tokens for plan in plans())):
        launch(num_tokens)
    known = set(compiled)
    for num_tokens in range(1024, 8193, 7):
        launch(num_tokens)
    assert compiled == known
