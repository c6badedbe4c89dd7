"""The device's adapter slots: checks, packing and memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.lora.adapters import ALL, Parts, make_adapter
from tests.quant.folders import FFN, HIDDEN, IDS, VOCAB, write_plain
from windlass.core.types import StepPlan
from windlass.errors import CheckpointError, EngineError
from windlass.kernels.lora import ReferenceLora
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora.codes import quantise
from windlass.lora.packing import as_stored
from windlass.lora.stored import StoredAdapter
from windlass.lora_config import LoraDType


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_plain(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def parts(folder: Path) -> Parts:
    return Parts(folder, [make_adapter("a", ALL)], max_rank=8)


def adapter_for(module: str, down: tuple[int, int], up: tuple[int, int]) -> Adapter:
    return Adapter("mine", {module: LoraWeights(torch.zeros(down), torch.zeros(up))})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            adapter_for("model.layers.0.self_attn.k_proj", (4, HIDDEN), (HIDDEN, 4)),
            r"'mine', model.layers.0.self_attn.k_proj: lora_A 4 x 128 and lora_B 128 x 4 .* "
            r"128 x 128, but the network's is 64 x 128",
        ),
        (adapter_for("lm_head", (4, HIDDEN), (VOCAB, 3)), "lora_B 97 x 3"),
        (
            adapter_for("model.layers.2.mlp.up_proj", (4, HIDDEN), (FFN, 4)),
            r"changes model.layers.2.mlp.up_proj, .*LlamaForCausalLM.* does not have",
        ),
        (adapter_for("lm_head", (9, HIDDEN), (VOCAB, 9)), "rank 9 is above --max-lora-rank 8"),
    ],
)
def test_mismatched_adapters_are_rejected_with_shapes(
    parts: Parts, adapter: Adapter, message: str
) -> None:
    before = parts.scores([IDS], [1])[0]
    for refuse in (parts.bank.check, lambda wrong: parts.bank.put(1, wrong)):
        with pytest.raises(CheckpointError, match=message):
            refuse(adapter)
    assert torch.equal(parts.scores([IDS], [1])[0], before), "the slot must not change"


def check_packed_equals_unpacked(parts: Parts, adapter: Adapter, packed: Adapter) -> torch.Tensor:
    """Logits of an adapter, equal unpacked and packed, after another adapter used the slot."""
    found = []
    for each in (adapter, make_adapter("a", ALL), packed):
        parts.bank.put(1, each)
        found.append(parts.scores([IDS], [1])[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    return found[0]


def test_packing_keeps_the_weights(parts: Parts) -> None:
    adapter = make_adapter("b", {"self_attn.k_proj": 2, "mlp.up_proj": 8, "lm_head": 3})
    packed = parts.bank.pack(adapter)
    assert packed.num_bytes == adapter.num_bytes
    for name, low in adapter.modules.items():
        assert all(map(torch.equal, packed.modules[name][:2], low[:2]))
    check_packed_equals_unpacked(parts, adapter, packed)


def test_packed_int8_codes_match_dequantised_weights(folder: Path) -> None:
    adapter = make_adapter("b", {"self_attn.k_proj": 2, "mlp.up_proj": 8, "lm_head": 3})
    parts = Parts(folder, max_rank=8, lora_dtype="int8")
    packed = parts.bank.pack(adapter)
    assert packed.packed is not None
    assert packed.packed.nbytes == adapter.num_bytes // 4 + 4 * 8 * 15
    decoded = {}
    for name, low in packed.modules.items():
        assert low.down.dtype == low.up.dtype == torch.int8
        assert low.scales is not None
        decoded[name] = LoraWeights(low.down.float(), low.up * low.scales)
    found = check_packed_equals_unpacked(parts, adapter, packed)
    exact = Parts(folder, [Adapter("b", decoded)], max_rank=8)
    torch.testing.assert_close(found, exact.scores([IDS], [1])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_by_output_layout_gives_the_same_outputs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: LoraDType
) -> None:
    """The layout of CUDA kernels gives the same outputs, for ranks of one and several chunks."""
    ranks = {"self_attn.k_proj": 2, "self_attn.o_proj": 16, "mlp.up_proj": 32, "mlp.down_proj": 21}
    adapter = make_adapter("b", ranks)
    usual = Parts(folder, [adapter], 32, dtype, plain_kernels=True)
    monkeypatch.setattr(ReferenceLora, "by_output", lambda *_, **__: True)
    parts = Parts(folder, max_rank=32, lora_dtype=dtype, plain_kernels=True)
    packed = parts.bank.pack(adapter)
    for name, low in packed.modules.items():
        assert low.up.shape == adapter.modules[name].up.shape
    found = check_packed_equals_unpacked(parts, adapter, packed)
    torch.testing.assert_close(found, usual.scores([IDS], [1])[0], atol=1e-4, rtol=1e-4)


def test_int8_codes_are_nearest_and_zero_ranks_have_scale_zero() -> None:
    low = make_adapter("a", {"mlp.down_proj": 4}).modules["model.layers.0.mlp.down_proj"]
    low.down[1], low.up[:, 2] = 0, 0
    coded = quantise(low)
    assert coded.scales is not None
    assert (coded.scales == 0).tolist() == [False, True, True, False]
    for rank in (0, 3):
        for half, codes in ((low.down[rank], coded.down[rank]), (low.up.T[rank], coded.up.T[rank])):
            step = half.abs().max() / 127
            assert codes.abs().max() == 127
            assert (codes * step - half).abs().max() <= step * 0.501
    changed = coded.up * coded.scales @ coded.down.float()
    exact = low.up @ low.down
    assert (changed - exact).norm() < 0.015 * exact.norm()


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_non_finite_values_are_rejected_with_the_file(folder: Path, dtype: LoraDType) -> None:
    parts = Parts(folder, max_rank=8, lora_dtype=dtype)
    changes = dict(as_stored(make_adapter("b", ALL)).modules)
    wrong = list(changes)[3]
    changes[wrong].up[5, 1] = math.nan
    with pytest.raises(CheckpointError, match=f"^its/file: {wrong} has values that are not fin"):
        parts.bank.pack(StoredAdapter("b", changes, "its/file"))


def test_slots_start_at_one(parts: Parts) -> None:
    for slot in (0, 2):
        with pytest.raises(ValueError, match=f"slot {slot} is not one of 1 to 1"):
            parts.bank.put(slot, make_adapter("b", ALL))


def test_num_bytes_counts_all_slots(parts: Parts, folder: Path) -> None:
    per_layer = 3 * HIDDEN + HIDDEN + 2 * HIDDEN + FFN  # inputs of each module
    per_layer += 2 * HIDDEN + HIDDEN + 2 * FFN + HIDDEN  # outputs
    numbers = 2 * 8 * (2 * per_layer + HIDDEN + VOCAB)
    ranks = 2 * (2 * 7 + 1)
    assert parts.bank.num_bytes == 4 * (numbers + ranks)
    codes = Parts(folder, max_rank=8, lora_dtype="int8")
    assert codes.bank.num_bytes == numbers + 4 * (ranks + 8 * ranks)


def test_runner_without_a_bank_raises(parts: Parts) -> None:
    parts.runner._bank = None
    with pytest.raises(EngineError, match=r"wants adapters \(x, y\), but this runner has no bank"):
        parts.runner.run(StepPlan([], adapters=[(1, "x"), (2, "y")]))
