"""Adapters on a real GPU: the kernels against the plain version, recorded steps against eager ones."""

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
    most: int,
    coded: bool = False,
    by_output: bool = False,
) -> Stacks:
    """Slots of growing rank, in bfloat16 or as codes that come to numbers of the same size."""
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.int8 if coded else torch.bfloat16}
    ranks = torch.zeros((slots + 1, len(sizes)), dtype=torch.int32, device="cuda")
    down = torch.zeros((slots + 1, len(sizes), most, num_in), **kind)
    up = torch.zeros((slots + 1, most * sum(sizes)), **kind)
    scales = torch.rand((*ranks.shape, most), device="cuda") / 800 if coded else None
    deltas: dict[int, list[LoraDelta]] = {slot: [] for slot in range(slots + 1)}
    stacks = Stacks(down, up, ranks, sizes, deltas, scales, by_output)
    for slot in range(1, slots + 1):
        rank = 1 + (slot * 7) % most
        ranks[slot] = rank
        for part in range(len(sizes)):
            own, pieces = stacks.destinations(slot, part, rank)
            for half in (own, *pieces):
                values = torch.randn(half.shape, device="cuda")
                half.copy_((values * 40).round().clamp(-127, 127) if coded else values)
    return stacks


@pytest.mark.parametrize("sizes", [(4096, 1024, 1024), (1536, 1536), (576,)], ids=str)
@pytest.mark.parametrize("counts", [[1] * 64, [1], [300, 1, 64, 7]], ids=len)
@pytest.mark.parametrize("form", ["floats", "codes", "codes by output"])
def test_kernels_equal_the_plain_version(
    sizes: tuple[int, ...], counts: list[int], form: str
) -> None:
    torch.manual_seed(0)
    stacks = make_stacks(1536, sizes, 16, 64, form != "floats", form == "codes by output")
    slots = np.repeat(np.arange(len(counts)) % 17, counts)
    if len(counts) == 1:
        slots[:] = 5
    x = torch.randn((len(slots), 1536), device="cuda", dtype=torch.bfloat16)
    y = torch.randn((len(slots), sum(sizes)), device="cuda", dtype=torch.bfloat16)
    device = torch.device("cuda")
    plain, rows = Lora(stacks, ReferenceLora()), grouped(slots, device)
    want = plain.end(y.clone(), x, rows)
    given = in_tiles(slots, counts, device)
    if max(counts) == 1:
        given = AdapterRows(given.slots)
    from windlass.kernels.triton.lora import TritonLora

    kernel = Lora(stacks, TritonLora())
    got = kernel.end(y.clone(), kernel.begin(x, given), given)
    assert torch.equal(got[slots == 0], y[slots == 0])
    assert off(got, want) < 0.01
    if len(sizes) == 2:
        from windlass.kernels.triton.norm import silu_mul

        active = kernel.gated(y.clone(), kernel.begin(x, given), given, silu_mul)
        assert off(active, plain.gated(y.clone(), x, rows, silu_mul)) < 0.02
    if len(sizes) == 1:
        need = Need(device, torch.bfloat16, Heads(4, 2, 64), 64)
        norm = RMSNorm(sizes[0], 1e-5, torch.bfloat16, choose_ops(need))
        norm.weight.data = torch.rand_like(y[0]) + 0.5
        residual = torch.randn_like(y)
        got = kernel.then(y.clone(), kernel.begin(x, given), given, residual.clone(), norm)
        want = plain.then(y.clone(), x, rows, residual.clone(), norm)
        assert off(got[1], want[1]) < 0.01
        assert off(got[0], want[0]) < 0.02


def off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.float() - want.float()).abs().max() / want.float().abs().max()


def scores(folder: Path, **options: Any) -> list[float]:
    """Of three requests with two adapters and none: a prompt, then one token a step."""
    parts = Parts(folder, ADAPTERS, device="cuda", **options)
    slots = [1, 0, 2]
    admitted = [parts.admit(IDS[i:], logprobs=1) for i in range(3)]
    found = []
    for start, count in ((0, 3), (3, 1), (4, 1), (5, 1)):
        rows = [
            parts.row(one, start, count, slot)._replace(sample=True)
            for one, slot in zip(admitted, slots, strict=True)
        ]
        for result in parts.run(rows, admitted if start == 0 else ()):
            assert result.logprobs is not None
            found.append(result.logprobs[0].logprob)
    return found


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_recorded_steps_equal_eager_ones_and_the_plain_version(folder: Path, kind: str) -> None:
    recorded = scores(folder, lora_dtype=kind)
    assert recorded == pytest.approx(scores(folder, lora_dtype=kind, enforce_eager=True), abs=0.05)
    assert recorded == pytest.approx(scores(folder, lora_dtype=kind, plain_kernels=True), abs=0.1)
    assert recorded == pytest.approx(scores(folder), abs=0.2)
