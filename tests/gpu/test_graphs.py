"""Captured graphs use one memory, also for their outputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windlass.runner.cuda.graphs import CudaBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_outputs_are_right_until_the_next_replay_and_take_memory_once() -> None:
    backend = CudaBackend()
    x = torch.arange(2**22, device="cuda").bfloat16()

    def scaled(factor: int) -> tuple[Tensor, ...]:
        whole = factor * x
        return whole, whole.view(2, -1)[:, 5:9], whole[:0]

    captured, reserved = [], []
    for factor in (2, 3, 5):
        captured.append(backend.capture(lambda factor=factor: scaled(factor)))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved == reserved[:1] * 3
    for factor, (replay, outputs) in zip((2, 3, 5), captured, strict=True):
        replay()
        want = scaled(factor)
        assert [each.shape for each in outputs] == [each.shape for each in want]
        assert all(torch.equal(a, b) for a, b in zip(outputs, want, strict=True))
