"""The two ways in which ranks sum their experts' results, and the bytes that each moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.expert_layers import Layers, Ranked, outputs, write_model
from tests.quant.ranks import ThreadGroup, thread_groups
from windlass.core.moe import ExpertPlacement, Routing
from windlass.kernels.reference_experts import route
from windlass.layers.expert_combine import CombineCost, CombineRule
from windlass.parallel.mesh import Group, Mesh

TOKENS = (0, 1, 2, 3, 40)


@dataclass
class Counted:
    """A group that counts the elements that this rank receives, and the calls by their names."""

    group: ThreadGroup
    received: int = 0
    calls: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls += ("all_reduce",)
        # A ring: each of the N parts of x is received N - 1 times, partly summed or summed.
        self.received += 2 * (self.size - 1) * x.numel() // self.size
        return self.group.all_reduce(x)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.calls += ("all_gather",)
        self.received += sum(widths) - widths[self.rank]
        return self.group.all_gather(x, widths)

    def all_to_all(self, x: Tensor, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.calls += ("all_to_all",)
        self.received += (sum(received) - received[self.rank]) * x.shape[1]
        return self.group.all_to_all(x, sent=sent, received=received)


def ranks_of(layers: Layers, size: int, rule: CombineRule) -> tuple[list[Counted], list[Ranked]]:
    groups = [Counted(group) for group in thread_groups(size)]
    ruled = replace(layers, parts=replace(layers.parts, expert_combine=rule))
    return groups, [ruled.load(Mesh(tp=group, ep=group)) for group in groups]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_experts": 16, "num_experts_per_tok": 2}
    return write_model("qwen3-moe", tmp_path_factory.mktemp("model"), **changes)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_both_ways_give_the_same_bits(folder: Path, size: int) -> None:
    """Also with fewer tokens than ranks, and with none."""
    layers = Layers.of(folder, index=1, dtype="float32")
    whole = layers.load(Mesh()).layer
    _, reduced = ranks_of(layers, size, "all-reduce")
    _, exchanged = ranks_of(layers, size, "all-to-all")
    for tokens in TOKENS:
        x = layers.inputs(tokens)
        want = outputs(reduced, x)
        for rank, got in enumerate(outputs(exchanged, x)):
            assert torch.equal(got, want[0]), (tokens, rank)
        with torch.inference_mode():
            torch.testing.assert_close(want[0], whole.output(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_the_received_elements_follow_the_formula(folder: Path, size: int) -> None:
    layers, tokens = Layers.of(folder, index=1, dtype="float32"), 400
    routing, hidden = Routing(num_experts=16, top_k=2), layers.hparams.hidden_size
    cost = CombineCost.of(routing, size)
    x = layers.inputs(tokens)
    groups, ranks = ranks_of(layers, size, "all-reduce")
    outputs(ranks, x)
    assert [group.received for group in groups] == [cost.all_reduce * tokens * hidden] * size
    assert {group.calls for group in groups} == {("all_reduce",)}
    groups, ranks = ranks_of(layers, size, "all-to-all")
    outputs(ranks, x)
    assert {group.calls for group in groups} == {("all_to_all", "all_gather")}
    # Exactly: a row for each token and each other rank with some of its experts.
    with torch.inference_mode():
        _, chosen = route(ranks[0].layer.gate(x), None, ranks[0].layer.experts.routing)
    owners = chosen // (16 // size)
    homes = torch.arange(tokens) * size // tokens
    rows = sum(
        len(set(row.tolist()) - {int(home)}) for row, home in zip(owners, homes, strict=True)
    )
    total = sum(group.received for group in groups)
    assert total == (rows + (size - 1) * tokens) * hidden
    # On average, with experts that are almost equally likely.
    assert total == pytest.approx(size * cost.all_to_all * tokens * hidden, rel=0.1)
    assert cost.all_to_all < cost.all_reduce


def test_the_number_of_tokens_decides(folder: Path) -> None:
    layers = Layers.of(folder, index=1, dtype="float32")
    groups, ranks = ranks_of(layers, 2, "auto")
    limit = ranks[0].layer.combine.min_tokens
    row_bytes = 4 * layers.hparams.hidden_size
    assert limit == CombineCost.of(ranks[0].layer.experts.routing, 2).min_tokens(row_bytes)
    assert 1000 < limit < math.inf
    for rank in ranks:
        rank.layer.combine.min_tokens = 20
    outputs(ranks, layers.inputs(19))
    outputs(ranks, layers.inputs(20))
    assert groups[0].calls == ("all_reduce", "all_to_all", "all_gather")


def test_without_expert_parallelism_results_are_reduced(folder: Path) -> None:
    layers = Layers.of(folder, index=1, dtype="float32")
    groups: list[Group] = [*thread_groups(2)]
    ruled = replace(layers, parts=replace(layers.parts, expert_combine="all-to-all"))
    ranks = [ruled.load(Mesh(tp=group)) for group in groups]
    assert ranks[0].layer.combine.min_tokens == math.inf
    x = layers.inputs(5)
    with torch.inference_mode():
        want = layers.load(Mesh()).layer.output(x)
    for got in outputs(ranks, x):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_placement_is_combined_by_its_owners(folder: Path) -> None:
    layers = Layers.of(folder, index=1, dtype="float32")
    ruled = replace(layers, parts=replace(layers.parts, expert_combine="all-to-all"))
    placement = ExpertPlacement((tuple(range(0, 16, 2)), tuple(range(15, 0, -2))))
    x = layers.inputs(30)
    with torch.inference_mode():
        want = layers.load(Mesh()).layer.output(x)
    for got in outputs(ruled.ranks(2, placement), x):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_cost_of_many_experts_per_token_approaches_all_reduce() -> None:
    few, many = (CombineCost.of(Routing(num_experts=64, top_k=k), 8) for k in (1, 60))
    assert few.all_to_all == pytest.approx((1 + 1 / 8) * 7 / 8)
    assert many.all_to_all == pytest.approx(many.all_reduce, rel=1e-3)
    assert few.min_tokens(14336) < many.min_tokens(14336)
    assert CombineCost.of(Routing(num_experts=64, top_k=8), 1).min_tokens(14336) == math.inf
