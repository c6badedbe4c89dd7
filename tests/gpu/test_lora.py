"""LoRA on a GPU: kernels against the reference, captured steps against eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lora.adapters import ALL, Parts, make_adapter
from tests.quant.folders import IDS, write_plain
from windlass.kernels.batch import AdapterRows, Heads
from windlass.kernels.lora import Lora, LoraDelta, ReferenceLora, Stacks
from windlass.kernels.ops import choose_ops
from windlass.kernels.select import Need
from windlass.layers.norm import RMSNorm
from windlass.runner.adapters import grouped, in_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ADAPTERS = [
    make_adapter("one", ALL, 1),
    make_adapter("some", {"self_attn.q_proj": 3, "self_attn.v_proj": 16, "lm_head": 8}, 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_plain(tmp_path_factory.mktemp("model") / "base")


def make_stacks(
    num_in: int,
    sizes: tuple[int, ...],
    slots: int,
    max_rank: int,
    quantised: bool = False,
    by_output: bool = False,
) -> Stacks:
    """Stacks of different ranks, in bfloat16 or as int8 codes of similar magnitude."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.int8 if quantised else torch.bfloat16}
    ranks = torch.zeros((slots + 1, len(sizes)), dtype=torch.int32, device="cuda")
    down = torch.zeros((slots + 1, len(sizes), max_rank, num_in), **kind)
    up = torch.zeros((slots + 1, max_rank * sum(sizes)), **kind)
    scales = torch.rand((*ranks.shape, max_rank), device="cuda") / 800 if quantised else None
    deltas: dict[int, list[LoraDelta]] = {slot: [] for slot in range(slots + 1)}
    stacks = Stacks(
        down=down,
        up=up,
        ranks=ranks,
        sizes=sizes,
        deltas=deltas,
        scales=scales,
        by_output=by_output,
    )
    for slot in range(1, slots + 1):
        rank = 1 + (slot * 7) % max_rank
        ranks[slot] = rank
        for part in range(len(sizes)):
            own_down, own_up = stacks.destinations(slot, part, rank)
            for matrix in (own_down, *own_up):
                values = torch.randn(matrix.shape, device="cuda")
                matrix.copy_((values * 40).round().clamp(-127, 127) if quantised else values)
    return stacks


@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (1536, 1536), (576,)], ids=str)
@pytest.mark.parametrize("counts", [[1] * 64, [1], [300, 1, 64, 7]], ids=len)
@pytest.mark.parametrize("form", ["floats", "int8", "int8 by output"])
def test_kernels_equal_the_reference(sizes: tuple[int, ...], counts: list[int], form: str) -> None:
    torch.manual_seed(0)
    stacks = make_stacks(1536, sizes, 16, 64, form != "floats", form == "int8 by output")
    slots = np.repeat(np.arange(len(counts)) % 17, counts)
    if len(counts) == 1:
        slots[:] = 5
    x = torch.randn((len(slots), 1536), device="cuda", dtype=torch.bfloat16)
    y = torch.randn((len(slots), sum(sizes)), device="cuda", dtype=torch.bfloat16)
    device = torch.device("cuda")
    reference, rows = Lora(stacks, ReferenceLora()), grouped(slots, device)
    want = reference.end(y.clone(), x, rows)
    adapters = in_tiles(slots, counts, device)
    if max(counts) == 1:
        adapters = AdapterRows(adapters.slots)
    from windlass.kernels.triton.lora import TritonLora

    kernel = Lora(stacks, TritonLora())
    got = kernel.end(y.clone(), kernel.begin(x, adapters), adapters)
    assert torch.equal(got[slots == 0], y[slots == 0])
    assert relative_error(got, want) < 0.01
    if len(sizes) == 2:
        from windlass.kernels.triton.norm import silu_mul

        active = kernel.gated(y.clone(), kernel.begin(x, adapters), adapters, silu_mul)
        assert relative_error(active, reference.gated(y.clone(), x, rows, silu_mul)) < 0.02
    if len(sizes) == 1:
        need = Need(device=device, dtype=torch.bfloat16, heads=Heads(4, 2, 64))
        norm = RMSNorm(sizes[0], 1e-5, torch.bfloat16, choose_ops(need))
        norm.weight.data = torch.rand_like(y[0]) + 0.5
        residual = torch.randn_like(y)
        got = kernel.then(y.clone(), kernel.begin(x, adapters), adapters, residual.clone(), norm)
        want = reference.then(y.clone(), x, rows, residual.clone(), norm)
        assert relative_error(got[1], want[1]) < 0.01
        assert relative_error(got[0], want[0]) < 0.02


def relative_error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.float() - want.float()).abs().max() / want.float().abs().max()


def scores(folder: Path, **options: Any) -> list[float]:
    """Logprobs of three requests with two adapters and none: a prompt, then one token per step."""
    parts = Parts(folder, ADAPTERS, device="cuda", **options)
    slots = [1, 0, 2]
    admitted = [parts.admit(IDS[i:], logprobs=1) for i in range(3)]
    found = []
    for start, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
        rows = [
            parts.row(each, start, count, slot)._replace(sample=True)
            for each, slot in zip(admitted, slots, strict=True)
        ]
        for result in parts.run(rows, admitted if start == 0 else ()):
            assert result.logprobs is not None
            found.append(result.logprobs[0].logprob)
    return found


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_captured_steps_equal_eager_steps_and_the_reference(folder: Path, kind: str) -> None:
    captured = scores(folder, lora_dtype=kind)
    assert captured == pytest.approx(scores(folder, lora_dtype=kind, enforce_eager=True), abs=0.05)
    assert captured == pytest.approx(scores(folder, lora_dtype=kind, plain_kernels=True), abs=0.1)
    assert captured == pytest.approx(scores(folder), abs=0.2)
