"""Networks whose GEMMs take over the norms before them give the logits of the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.comparison import logits_of, make_parts, save_tiny
from windlass.config import ModelConfig
from windlass.kernels.gemm import Norm, TorchGemm
from windlass.kernels.gemm_io import Inputs, Outputs, UnnormalisedInputs
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.source import resolve
from windlass.quant.unquantised import Unquantised

TILE = 16


class DeferringGemm(TorchGemm):
    """Leaves every norm that a GEMM of one row can take over to it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deferred = 0

    def takes_unnormalised(self, weight: Tensor, num_rows: int) -> bool:
        del weight
        return num_rows == 1

    def linear(self, x: Inputs, weight: Tensor) -> Tensor:
        return super().linear(x.normalised() if isinstance(x, UnnormalisedInputs) else x, weight)

    def linear_norm(
        self, x: Inputs, weight: Tensor, residual: Tensor, norm: Norm
    ) -> tuple[Inputs, Tensor]:
        if not norm.defers(x.shape[0]):
            return super().linear_norm(x, weight, residual, norm)
        self.num_deferred += 1
        residual += self.linear(x, weight)
        squares = residual.square().view(-1, TILE).sum(1)
        return UnnormalisedInputs(residual, squares, norm.weight, norm.eps), residual

    def gated(self, x: Inputs, weight: Tensor, silu_mul: Callable[[Outputs], Inputs]) -> Inputs:
        return silu_mul(self.linear(x, weight))


# Norms before each layer's GEMMs, but for the first one, whose input is the embedding.
NUM_LAYERS = 3
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("Llama", {}, 2 * NUM_LAYERS - 1),
    "biases": ("Qwen2", {}, 2 * NUM_LAYERS - 1),
    "norms of heads": ("Qwen3", {"head_dim": 8}, 2 * NUM_LAYERS - 1),
    "norms of outputs": ("Gemma2", {"head_dim": 8}, 0),
    "experts": ("Mixtral", {"num_local_experts": 4}, 0),
    "layer norms": ("GPT2", {"num_key_value_heads": 6, "n_inner": 80}, 0),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, tmp_path: Path) -> None:
    family, changes, num_deferred = FAMILIES[name]
    save_tiny(family, changes, tmp_path)
    config = ModelConfig(model=str(tmp_path))
    files = resolve(config)
    hparams, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    gemm = DeferringGemm()
    method = Unquantised(torch.float32, gemm)
    parts = replace(make_parts(hparams), method_for=lambda *_: method)
    ids = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    chunks = [5, 1, 1, 17]
    want = logits_of(hparams, checkpoint, ids, chunks=chunks)
    got = logits_of(hparams, checkpoint, ids, chunks=chunks, parts=parts)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert gemm.num_deferred == 2 * num_deferred, "in the two chunks of one token"
