"""Ranks that divide the experts of a layer: what each reads, and that their sum is the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_moe_families import GGUF_CASES, write_moe_gguf
from tests.parallel.expert_layers import SIZES, Layers, outputs, write_model, write_mxfp4
from tests.quant import packers, test_files
from tests.quant.folders import rewrite
from tests.quant.ranks import thread_groups
from windlass.core.moe import ExpertPlacement
from windlass.errors import CheckpointError, ConfigError, ShardError
from windlass.parallel.mesh import Mesh, SingleRank

SHUFFLED = ExpertPlacement(((7, 2), (0, 1, 4), (5, 3, 6)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return write_model("qwen3-moe", folder, **SIZES, moe_intermediate_size=128)


def _fp8(block: int | None, input_scale: float | None) -> tuple[Any, dict[str, Any]]:
    changes: dict[str, Any] = {"activation_scheme": "static" if input_scale else "dynamic"}
    if block is not None:
        changes |= {"weight_block_size": [block, block]}
    return lambda _, weight: packers.fp8(weight, block, input_scale), test_files.FP8 | changes


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": test_files.CASES["awq"],
    "gptq": test_files.CASES["gptq"],
    "gptq 8": test_files.CASES["gptq 8"],
    "nf4 nested": test_files.CASES["nf4 nested"],
    "bnb int8": test_files.CASES["bnb int8"],
    "fp8": _fp8(None, None),
    "fp8 static": _fp8(None, 0.02),
    "fp8 blocks": _fp8(128, None),
}


def assert_divided(layers: Layers, size: int, placement: ExpertPlacement | None = None) -> None:
    """Every tensor of an expert is read by its rank alone, and all ranks have the whole's result."""
    whole = layers.load(Mesh())
    ranks = layers.ranks(size, placement)
    held = (
        placement or ExpertPlacement.contiguous(whole.layer.experts.routing.num_experts, size)
    ).ranks
    for name in whole.reads.reads:
        readers = [i for i, rank in enumerate(ranks) if name in rank.reads.reads]
        if ".experts." not in name or not name.split(".experts.")[1][0].isdigit():
            assert readers == list(range(size)), name
            continue
        expert = int(name.split(".experts.")[1].split(".")[0])
        assert [expert in held[i] for i in readers] == [True], name
        (reader,) = readers
        assert torch.equal(ranks[reader].reads.reads[name][2], whole.reads.reads[name][2])
    for tokens in (1, 13):
        x = layers.inputs(tokens)
        with torch.inference_mode():
            want = whole.layer.output(x)
        assert want.std() > 0.01
        for got in outputs(ranks, x):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", [*FORMATS, "plain"])
def test_every_format_is_divided_by_expert(name: str, plain: Path, tmp_path: Path) -> None:
    folder = plain if name == "plain" else rewrite(plain, tmp_path / "q", *FORMATS[name])[0]
    for options in ({"dtype": "float32"}, {"plain_kernels": True}):
        assert_divided(Layers.of(folder, **options), 3)  # uneven: 2, 3 and 3 experts


def test_experts_may_differ_in_their_formats(plain: Path, tmp_path: Path) -> None:
    kept = "model.layers.0.mlp.experts.3.gate_proj"
    quantization = test_files.AWQ | {"modules_to_not_convert": [kept]}
    folder, reference = rewrite(
        plain,
        tmp_path / "q",
        lambda name, weight: None if name == kept else packers.awq(weight, 32),
        quantization,
    )
    layers = Layers.of(folder, dtype="float32")
    assert_divided(layers, 2)
    x = layers.inputs(5)
    with torch.inference_mode():
        want = Layers.of(reference, dtype="float32").load(Mesh()).layer.output(x)
        torch.testing.assert_close(layers.load(Mesh()).layer.output(x), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4", "nf4"])
def test_online_quantisation_is_divided_by_expert(scheme: str, plain: Path) -> None:
    assert_divided(Layers.of(plain, quantization=scheme, plain_kernels=True), 2, None)


@pytest.mark.parametrize("size", [2, 3])
def test_mxfp4_and_stacked_experts_are_divided(size: int, tmp_path: Path) -> None:
    plain = write_model("gpt-oss", tmp_path / "plain", hidden_size=64, intermediate_size=96)
    assert_divided(Layers.of(plain, dtype="float32"), size)
    packed = write_mxfp4(plain, tmp_path / "q")
    assert_divided(Layers.of(packed, dtype="float32"), size)
    assert_divided(Layers.of(packed, plain_kernels=True), size)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen2-moe", "glm-4.5-moe"])
def test_gguf_stacks_are_cut_along_the_experts(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    path = write_moe_gguf(tmp_path, *GGUF_CASES[name])
    assert_divided(Layers.of(path, index=1, dtype="float32"), 2)


@pytest.mark.parametrize("name", ["qwen3-moe", "granite-moe", "qwen2-moe", "glm-4.5-moe-norms"])
def test_families_are_divided(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path)
    assert_divided(Layers.of(tmp_path, index=2, dtype="float32"), 2)


def test_a_placement_decides_which_experts_a_rank_holds(plain: Path) -> None:
    layers = Layers.of(plain, dtype="float32")
    assert_divided(layers, 3, SHUFFLED)
    first = layers.ranks(3, SHUFFLED)[0].layer.experts
    assert list(first.down.parts) == ["7.down_proj", "2.down_proj"]


def test_sizes_that_cannot_be_cut_run_with_expert_parallelism(plain: Path, tmp_path: Path) -> None:
    folder = rewrite(plain, tmp_path / "q", *FORMATS["fp8 blocks"])[0]
    layers = Layers.of(folder, dtype="float32")
    group = thread_groups(2)[0]
    with pytest.raises(ShardError, match="cannot be cut into 2 shards"):
        layers.load(Mesh(tp=group))
    layers.load(Mesh(tp=group, ep=group))


def test_a_missing_expert_is_an_error_of_its_rank(plain: Path) -> None:
    layers = Layers.of(plain, dtype="float32")
    gone = "model.layers.0.mlp.experts.5.up_proj.weight"
    known = [name for name in layers.checkpoint.names() if name != gone]

    class Without:
        def __init__(self, checkpoint: Any) -> None:
            self.stored, self.read = checkpoint.stored, checkpoint.read

        def names(self) -> list[str]:
            return known

    broken = Layers(layers.hparams, Without(layers.checkpoint), layers.parts, 0)
    first, second = thread_groups(2)
    broken.load(Mesh(tp=first, ep=first))
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight"):
        broken.load(Mesh(tp=second, ep=second))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0, 1), (2, 2)), r"each of its 4 experts once, numbered from 0; it has \[0, 1, 2, 2\]"),
        (((0, 1, 2), (3,)), r"hold \[3, 1\] experts"),
        (((0,), ()), r"hold \[1, 0\] experts"),
    ],
)
def test_bad_placements_are_refused(ranks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement(ranks)


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 experts cannot be spread over 5 ranks"):
        ExpertPlacement.contiguous(4, 5)
    assert ExpertPlacement.contiguous(5, 2).ranks == ((0, 1), (2, 3, 4))


def test_experts_are_cut_by_tensor_parallelism_without_expert_parallelism() -> None:
    groups = thread_groups(2)
    assert Mesh(tp=groups[0]).expert_tp is groups[0]
    assert Mesh(tp=groups[0], ep=groups[0]).expert_tp == SingleRank()
