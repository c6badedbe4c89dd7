"""Packed weights with a dequantised copy: which of them a GEMM reads, and that both mean the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.serve.tiny_model import write_tiny_model
from windlass import LLM
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.kernels.copied import MAX_PACKED_ROWS, CopiedGemm, why_not_copied
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.linears import Linears
from windlass.models.network import Network
from windlass.quant.rounding import SCHEMES, quantise
from windlass.runner.load import check_copies

CPU = torch.device("cpu")


class CountingGemm(TorchGemm):
    """Counts the GEMMs with the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return super().linear(x, weight)


def weight() -> Tensor:
    return torch.randn(96, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("scheme", ["int4", "int8", "nf4"])
def test_many_rows_read_the_copy(scheme: str) -> None:
    gemm = CountingGemm()
    form = quantise(weight(), SCHEMES[scheme])
    linears = Linears(CPU, torch.float32, gemm, plain=True, copies=True)
    held = linears.prepare(form)
    plain = Linears(CPU, torch.float32, plain=True).prepare(form)
    assert isinstance(held.prepared, CopiedGemm)
    assert "16-bit copy" in held.kernel
    for rows in (1, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 300):
        x = torch.randn(rows, 128)
        torch.testing.assert_close(held.prepared.apply(x), plain.prepared.apply(x))
        found = held.prepared.gated(x, lambda y: y)
        torch.testing.assert_close(found, plain.prepared.gated(x, lambda y: y))
    many = [rows for rows in (MAX_PACKED_ROWS + 1, 300) for _ in range(2)]
    assert gemm.rows == many
    assert held.prepared.num_bytes == plain.prepared.num_bytes + 4 * form.shape[0] * form.shape[1]

    assert held.prepared.read_bytes(MAX_PACKED_ROWS) == plain.prepared.num_bytes
    assert held.prepared.read_bytes(300) == 4 * form.shape[0] * form.shape[1]

    other = CountingGemm()
    shared = Linears(CPU, torch.float32, other, plain=True, copies=True).share(held)
    shared.prepared.apply(torch.randn(300, 128))
    assert (gemm.rows, other.rows) == (many, [300])


@pytest.mark.parametrize("scheme", ["fp8", "w8a8"])
def test_formats_that_quantise_activations_have_no_copy(scheme: str) -> None:
    form = quantise(weight(), SCHEMES[scheme])
    assert why_not_copied(form) is not None
    held = Linears(CPU, torch.float32, plain=True, copies=True).prepare(form)
    assert not isinstance(held.prepared, CopiedGemm)


def test_a_flag_without_effect_is_an_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="--dequantized-copies is for GPUs"):
        LLM(str(tmp_path), device="cpu", dequantized_copies=True)

    class Nothing(Network):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        kv_layout = embed = forward = logits = None  # type: ignore[assignment]

    config = EngineConfig.of(dequantized_copies=True).model
    with pytest.raises(ConfigError, match="this model's weights are: not quantised"):
        check_copies(config, Nothing())
