"""The device's slots: what fits, what is refused with which words, and how much memory it takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.lora.adapters import ALL, Parts, make_adapter
from tests.quant.folders import FFN, HIDDEN, IDS, VOCAB, write_plain
from windlass.core.types import StepPlan
from windlass.errors import CheckpointError, EngineError
from windlass.kernels.lora import PlainLora
from windlass.lora.base import Adapter, Low
from windlass.lora.codes import encode
from windlass.lora.packing import stored
from windlass.lora.stored import StoredAdapter
from windlass.lora_config import LoraDType


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_plain(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def parts(folder: Path) -> Parts:
    return Parts(folder, [make_adapter("a", ALL)], max_rank=8)


def changing(module: str, down: tuple[int, int], up: tuple[int, int]) -> Adapter:
    return Adapter("mine", {module: Low(torch.zeros(down), torch.zeros(up))})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            changing("model.layers.0.self_attn.k_proj", (4, HIDDEN), (HIDDEN, 4)),
            r"'mine', model.layers.0.self_attn.k_proj: lora_A 4 x 128 and lora_B 128 x 4 .* "
            r"128 x 128, but the network's is 64 x 128",
        ),
        (changing("lm_head", (4, HIDDEN), (VOCAB, 3)), "lora_B 97 x 3"),
        (
            changing("model.layers.2.mlp.up_proj", (4, HIDDEN), (FFN, 4)),
            r"changes model.layers.2.mlp.up_proj, .*LlamaForCausalLM.* does not have",
        ),
        (changing("lm_head", (9, HIDDEN), (VOCAB, 9)), "rank 9 is above --max-lora-rank 8"),
    ],
)
def test_what_does_not_fit_is_named(parts: Parts, adapter: Adapter, message: str) -> None:
    before = parts.scores([IDS], [1])[0]
    for refuse in (parts.bank.check, lambda wrong: parts.bank.put(1, wrong)):
        with pytest.raises(CheckpointError, match=message):
            refuse(adapter)
    assert torch.equal(parts.scores([IDS], [1])[0], before), "the slot is as it was"


def same_in_a_slot(parts: Parts, adapter: Adapter, packed: Adapter) -> torch.Tensor:
    """Scores of an adapter: the same when it comes packed, and another was in its slot meanwhile."""
    found = []
    for each in (adapter, make_adapter("a", ALL), packed):
        parts.bank.put(1, each)
        found.append(parts.scores([IDS], [1])[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    return found[0]


def test_packed_adapters_are_the_same(parts: Parts) -> None:
    adapter = make_adapter("b", {"self_attn.k_proj": 2, "mlp.up_proj": 8, "lm_head": 3})
    packed = parts.bank.pack(adapter)
    assert packed.num_bytes == adapter.num_bytes
    for name, low in adapter.modules.items():
        assert all(map(torch.equal, packed.modules[name][:2], low[:2]))
    same_in_a_slot(parts, adapter, packed)


def test_packed_codes_are_what_a_slot_computes(folder: Path) -> None:
    adapter = make_adapter("b", {"self_attn.k_proj": 2, "mlp.up_proj": 8, "lm_head": 3})
    parts = Parts(folder, max_rank=8, lora_dtype="int8")
    packed = parts.bank.pack(adapter)
    assert packed.packed is not None
    assert packed.packed.nbytes == adapter.num_bytes // 4 + 4 * 8 * 15
    decoded = {}
    for name, low in packed.modules.items():
        assert low.down.dtype == low.up.dtype == torch.int8
        assert low.scales is not None
        decoded[name] = Low(low.down.float(), low.up * low.scales)
    found = same_in_a_slot(parts, adapter, packed)
    exact = Parts(folder, [Adapter("b", decoded)], max_rank=8)
    torch.testing.assert_close(found, exact.scores([IDS], [1])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_ranks_of_an_output_may_lie_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: LoraDType
) -> None:
    """As kernels on CUDA want it; what is computed is the same, for ranks of one and more pieces."""
    ranks = {"self_attn.k_proj": 2, "self_attn.o_proj": 16, "mlp.up_proj": 32, "mlp.down_proj": 21}
    adapter = make_adapter("b", ranks)
    usual = Parts(folder, [adapter], 32, dtype, plain_kernels=True)
    monkeypatch.setattr(PlainLora, "by_output", lambda *_: True)
    parts = Parts(folder, max_rank=32, lora_dtype=dtype, plain_kernels=True)
    packed = parts.bank.pack(adapter)
    for name, low in packed.modules.items():
        assert low.up.shape == adapter.modules[name].up.shape
    found = same_in_a_slot(parts, adapter, packed)
    torch.testing.assert_close(found, usual.scores([IDS], [1])[0], atol=1e-4, rtol=1e-4)


def test_codes_are_the_nearest_and_a_rank_of_zeros_changes_nothing() -> None:
    low = make_adapter("a", {"mlp.down_proj": 4}).modules["model.layers.0.mlp.down_proj"]
    low.down[1], low.up[:, 2] = 0, 0
    coded = encode(low)
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
def test_numbers_that_are_none_are_refused_with_the_file(folder: Path, dtype: LoraDType) -> None:
    parts = Parts(folder, max_rank=8, lora_dtype=dtype)
    changes = dict(stored(make_adapter("b", ALL)).modules)
    wrong = list(changes)[3]
    changes[wrong].up[5, 1] = math.nan
    with pytest.raises(CheckpointError, match=f"^its/file: {wrong} has numbers that are not fin"):
        parts.bank.pack(StoredAdapter("b", changes, "its/file"))


def test_slots_are_counted_from_one(parts: Parts) -> None:
    for slot in (0, 2):
        with pytest.raises(ValueError, match=f"slot {slot} is not one of 1 to 1"):
            parts.bank.put(slot, make_adapter("b", ALL))


def test_memory_is_that_of_the_slots(parts: Parts, folder: Path) -> None:
    per_layer = 3 * HIDDEN + HIDDEN + 2 * HIDDEN + FFN  # inputs, once for each module
    per_layer += 2 * HIDDEN + HIDDEN + 2 * FFN + HIDDEN  # outputs
    numbers = 2 * 8 * (2 * per_layer + HIDDEN + VOCAB)
    ranks = 2 * (2 * 7 + 1)
    assert parts.bank.num_bytes == 4 * (numbers + ranks)
    codes = Parts(folder, max_rank=8, lora_dtype="int8")
    assert codes.bank.num_bytes == numbers + 4 * (ranks + 8 * ranks)


def test_a_runner_without_a_bank_says_so(parts: Parts) -> None:
    parts.runner._bank = None
    with pytest.raises(EngineError, match=r"wants adapters \(x, y\), but this runner has no bank"):
        parts.runner.run(StepPlan([], adapters=[(1, "x"), (2, "y")]))
