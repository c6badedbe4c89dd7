"""Packed weights with a dequantised copy: which of them a GEMM reads, and that both mean the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.serve.tiny_model import write_tiny_model
from windlass import LLM
from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.kernels.copied import MAX_PACKED_ROWS, CopiedGemm, why_not_copied
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.linears import Linears
from windlass.layers.stored import StoredWeight
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.loader import outline
from windlass.models.network import Network, kv_layout, make_network
from windlass.models.source import resolve
from windlass.parallel.mesh import Mesh, SingleRank
from windlass.quant.rounding import SCHEMES, quantise
from windlass.runner.copies import Copies, choose_copies
from windlass.runner.device import gib
from windlass.runner.load import check_copies, load_network
from windlass.tools.plan import select_quantization
from windlass.tools.plan.formats import Target, meta_parts
from windlass.tools.plan.scaling import ScalingQuery, plan_on_h200

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


GPU = torch.device("cuda")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
LAYER_WEIGHTS = 128 * 128 * 3 + 128 * 256 * 3
COPIES = 2 * 4 * LAYER_WEIGHTS  # bytes
STEP = 64 * 2 * (2 * 128 + 3 * 256) + 2 * 512 * 6  # of up to 64 tokens, 2 of them sampled
PACKED = COPIES // 4 + 4 * LAYER_WEIGHTS // 128 * 4 + 2 * (2 * 512 * 128 + 9 * 128)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


class Chosen(NamedTuple):
    copies: Copies
    choices: list[Choice]


def chosen(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    memory: int,
    used: int = 0,
    mesh: Mesh | None = None,
    quantization: str | None = "int4",
    **options: Any,
) -> Chosen:
    """The choice of a start on a GPU with this memory."""
    config = EngineConfig.of(
        model=str(model), load_format="dummy", quantization=quantization, device="cuda", **options
    )
    files = resolve(config.model)
    hparams = load_hparams(files, config.model)
    target = Target(GPU, present=False)
    made = meta_parts(config.model, hparams, open_checkpoint(files, config.model), target)
    parts = replace(made.parts, device=GPU, mesh=mesh or Mesh())
    monkeypatch.setattr("windlass.runner.copies.whole_bytes", lambda _: memory)
    monkeypatch.setattr("windlass.runner.copies.free_bytes", lambda _: memory - used)
    network = make_network(hparams, made.parts)
    layout = kv_layout(hparams, 16, torch.bfloat16)
    copies = choose_copies(config, hparams, network, parts=parts, layout=layout)
    outline(network)
    return Chosen(copies.loaded(network), copies.choices(network))


def test_copies_are_made_where_memory_allows_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = partial(chosen, tiny, monkeypatch, max_num_batched_tokens=64, max_num_seqs=2)
    found = start(memory=8 * COPIES)
    assert found.copies.made
    assert [(item.what, item.value) for item in found.choices] == [("16-bit copies", gib(COPIES))]
    refused = start(memory=8 * COPIES - 1)
    assert not refused.copies.made
    (line,) = refused.choices
    assert line.value == "none"
    assert "more than an eighth of the GPU's" in line.reason
    assert "--dequantized-copies makes them" in line.reason


def test_copies_leave_memory_for_the_kv_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 20 * COPIES
    start = partial(
        chosen, tiny, monkeypatch, memory=memory, max_num_batched_tokens=64, max_num_seqs=2
    )
    room = 4 * COPIES + PACKED + STEP  # for weights, steps and the KV cache
    assert start(memory_share=1.0, used=memory - room).copies.made
    refused = start(memory_share=1.0, used=memory - room + 1).copies
    assert not refused.made
    assert "left for the KV cache" in refused.reason
    # By default 0.85 of the memory is used.
    assert not start(used=int(0.85 * memory) - room + 1).copies.made
    # A set size leaves all else; a block has 16 tokens of 4 layers with 4 heads of 16 for keys and values.
    block = 16 * 4 * 2 * 4 * 16 * 2
    for set_size in ({"kv_cache_memory_bytes": 7 * block}, {"num_blocks": 7}):
        assert start(used=memory - room - 7 * block, **set_size).copies.made
        assert not start(used=memory - room - 7 * block + 1, **set_size).copies.made


def test_flags_decide_alone(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = chosen(tiny, monkeypatch, memory=COPIES, dequantized_copies=True)
    assert (asked.copies.made, asked.copies.reason) == (True, "as set")
    refused = chosen(tiny, monkeypatch, memory=100 * COPIES, dequantized_copies=False)
    assert (refused.copies.made, refused.choices[0].value) == (False, "none")


def test_weights_are_counted_only_if_memory_is_scarce(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations with meta tensors import torch._dynamo, which takes a second."""
    counted: list[Network] = []
    monkeypatch.setattr("windlass.runner.copies.outline", counted.append)
    assert chosen(tiny, monkeypatch, memory=2**40).copies.made
    assert not chosen(tiny, monkeypatch, memory=2**40, quantization=None).choices
    assert not counted


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_weights_without_copies_have_no_line(
    quantization: str | None, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = chosen(tiny, monkeypatch, memory=100 * COPIES, quantization=quantization)
    assert (found.copies.made, found.choices) == (False, [])


@dataclass(frozen=True)
class TwoRanks(SingleRank):
    """Two ranks; `other`: the number that the other one sends."""

    other: int = 1

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert widths == [1, 1]
        return torch.cat([x, torch.tensor([self.other])])


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_agree(other: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TwoRanks(size=2, other=other)
    mesh = Mesh(world=world)
    copies = chosen(tiny, monkeypatch, memory=100 * COPIES, mesh=mesh).copies
    assert copies.made == bool(other)
    assert other or "another rank" in copies.reason


@pytest.mark.parametrize("memory", [8 * COPIES - 1, 8 * COPIES, 30 * COPIES])
def test_a_plan_agrees_with_the_start(
    memory: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = select_quantization(
        str(tiny),
        memory=memory,
        bandwidth=1e12,
        concurrency=2,
        context=64,
        formats=["int4"],
        kv_cache_dtype="auto",
        load_format="dummy",
        device="cuda",
        max_num_batched_tokens=64,
    )
    (item,) = found.candidates
    options = {name: value for name, value in item.options.items() if name != "quantization"}
    start = chosen(tiny, monkeypatch, memory=memory, max_num_batched_tokens=64, **options)
    assert item.copy_bytes == (COPIES if start.copies.made else 0)
    assert item.weight_bytes == PACKED + item.copy_bytes


@pytest.mark.parametrize("memory", [8 * COPIES - 1, 8 * COPIES, 20 * COPIES, 100 * COPIES])
def test_a_plan_of_several_gpus_agrees_with_the_start(
    memory: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.of(model=str(tiny), load_format="dummy", quantization="int4")
    monkeypatch.setattr("windlass.tools.plan.scaling._RESERVE_BYTES", 0)
    (layout,) = plan_on_h200(config, ScalingQuery(devices=1, context=64), memory=memory).layouts
    made = chosen(tiny, monkeypatch, memory=memory).copies.made
    assert layout.weight_bytes == PACKED + made * COPIES
    asked = replace(config, model=replace(config.model, dequantized_copies=True))
    (layout,) = plan_on_h200(asked, ScalingQuery(devices=1, context=64), memory=memory).layouts
    assert layout.weight_bytes == PACKED + COPIES


def test_engines_that_share_weights_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path)
    options = {"quantization": "int8", "plain_kernels": True, "device": "cpu", "num_threads": 1}
    config = EngineConfig.of(model=str(tmp_path), **options)
    files = resolve(config.model)
    hparams, checkpoint = load_hparams(files, config.model), open_checkpoint(files, config.model)
    made = Copies(True, "a GPU of this test")
    monkeypatch.setattr("windlass.runner.load.choose_copies", lambda *_, **__: made)
    owner = load_network(config, hparams, checkpoint)
    stored = [each for each in owner.network.modules() if isinstance(each, StoredWeight)]
    gemms = [gemm for each in stored for gemm in each.gemms]
    assert gemms
    assert all(isinstance(gemm.prepared, CopiedGemm) for gemm in gemms)
    assert [item.reason for item in owner.choices if item.what == "16-bit copies"] == [made.reason]
    shared = load_network(config, hparams, checkpoint, weights=owner)
    assert shared.copies == made
    refusing = EngineConfig.of(model=str(tmp_path), dequantized_copies=False, **options)
    with pytest.raises(ConfigError, match="dequantized_copies True, but this engine has False"):
        load_network(refusing, hparams, checkpoint, weights=owner)


def test_tables_of_which_only_rows_are_read_have_no_copy() -> None:
    linears = Linears(CPU, torch.float32, plain=True, copies=True)
    form = quantise(weight(), SCHEMES["int4"])
    assert linears.prepare(form).copy_bytes
    table = linears.prepare(form, multiplied=False)
    assert not isinstance(table.prepared, CopiedGemm)
    assert not table.copy_bytes
