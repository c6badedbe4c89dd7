"""The device's slots: what fits, what is refused with which words, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lora.adapters import ALL, Parts, make_adapter
from tests.quant.folders import FFN, HIDDEN, IDS, VOCAB, write_plain
from windlass.core.types import StepPlan
from windlass.errors import CheckpointError, EngineError
from windlass.lora.base import Adapter, Low


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Parts:
    folder: Path = write_plain(tmp_path_factory.mktemp("model") / "base")
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


def test_packed_adapters_are_the_same(parts: Parts) -> None:
    adapter = make_adapter("b", {"self_attn.k_proj": 2, "mlp.up_proj": 8, "lm_head": 3})
    packed = parts.bank.pack(adapter)
    assert packed.num_bytes == adapter.num_bytes
    for name, low in adapter.modules.items():
        assert all(map(torch.equal, packed.modules[name], low))
    found = []
    for each in (adapter, make_adapter("a", ALL), packed):
        parts.bank.put(1, each)
        found.append(parts.scores([IDS], [1])[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_slots_are_counted_from_one(parts: Parts) -> None:
    for slot in (0, 2):
        with pytest.raises(ValueError, match=f"slot {slot} is not one of 1 to 1"):
            parts.bank.put(slot, make_adapter("b", ALL))


def test_memory_is_that_of_the_slots(parts: Parts) -> None:
    per_layer = 3 * HIDDEN + HIDDEN + 2 * HIDDEN + FFN  # inputs, once for each module
    per_layer += 2 * HIDDEN + HIDDEN + 2 * FFN + HIDDEN  # outputs
    numbers = 2 * 8 * (2 * per_layer + HIDDEN + VOCAB)
    ranks = 2 * (2 * 7 + 1)
    assert parts.bank.num_bytes == 4 * (numbers + ranks)


def test_a_runner_without_a_bank_says_so(parts: Parts) -> None:
    parts.runner._bank = None
    with pytest.raises(EngineError, match=r"wants adapters \(x, y\), but this runner has no bank"):
        parts.runner.run(StepPlan([], adapters=[(1, "x"), (2, "y")]))
