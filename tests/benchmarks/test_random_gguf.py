"""GGUF files with random weights: the shape of a config.json, in a given type."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from docs_tables import COLUMNS
from draft_pairs import PairConfig, draft_pairs
from random_gguf import StorageTypes, Weights, write_gguf

from tests.tools.conftest import CONFIG
from windlass import LLM, SamplingParams
from windlass.errors import ConfigError
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.gguf_header import read_header


@pytest.mark.slow
@pytest.mark.usefixtures("default_gguf")
def test_a_file_has_the_shape_and_can_be_served(tiny: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.gguf"
    assert write_gguf(str(tiny), StorageTypes("Q4_0", "Q8_0"), made) == made.stat().st_size
    header = read_header(made)
    assert header.metadata["llama.feed_forward_length"] == CONFIG["intermediate_size"]
    kinds = {name: tensor.type.name for name, tensor in header.tensors.items()}
    assert (kinds["blk.1.ffn_down.weight"], kinds["output.weight"]) == ("Q4_0", "Q8_0")
    llm = LLM(str(made), max_model_len=64)
    result = llm.generate(["Hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == 5


@pytest.mark.usefixtures("default_gguf")
def test_types_without_a_quantiser_are_random_blocks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "hidden_size": 256, "intermediate_size": 256})
    )
    made = tmp_path / "made.gguf"
    write_gguf(str(tmp_path), StorageTypes("IQ2_XXS", "IQ4_NL"), made)
    kinds = {name: tensor.type.name for name, tensor in read_header(made).tensors.items()}
    assert (kinds["blk.1.ffn_down.weight"], kinds["token_embd.weight"]) == ("IQ2_XXS", "IQ4_NL")
    llm = LLM(str(made), max_model_len=64)
    result = llm.generate(["Hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({}, "Q9_K", "--type 'Q9_K' is not known. Known: F16, Q4_0"),
        ({"hidden_size": 40}, "Q4_0", "hidden_size must be a multiple of 32"),
        ({"hidden_size": 32}, "IQ2_XXS", "hidden_size must be a multiple of 256"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Q8_0", "is a Qwen3ForCausalLM"),
    ],
)
def test_unsupported_shapes_and_types_are_rejected(
    tmp_path: Path, changes: dict[str, object], kind: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    made = tmp_path / "made.gguf"
    with pytest.raises(ConfigError, match=message):
        write_gguf(str(tmp_path), StorageTypes(kind, "Q8_0"), made)
    assert not made.exists()


@pytest.mark.usefixtures("default_gguf")
def test_a_draft_model_has_the_first_layers_of_its_target(tiny: Path, tmp_path: Path) -> None:
    made = {
        "target": Weights(quiet_from=1, quiet=0.5),
        "same": Weights(num_layers=1),
        "other": Weights(num_layers=1, seed=1),
    }
    tensors = {}
    for name, weights in made.items():
        path = tmp_path / f"{name}.gguf"
        write_gguf(str(tiny), StorageTypes("F16", "Q8_0"), path, weights)
        checkpoint = GGUFCheckpoint(path)
        tensors[name] = {
            tensor: checkpoint.read(tensor, checkpoint.stored(tensor).shape)
            for tensor in checkpoint.names()
        }
    target, same, other = tensors.values()
    assert set(same) < set(target)
    assert all((target[name] == same[name]).all() for name in same)
    assert (other["model.embed_tokens.weight"] != same["model.embed_tokens.weight"]).any()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        first, second = (target[f"model.layers.{layer}.{name}.weight"] for layer in (0, 1))
        largest = first.abs().max().item()
        assert second.abs().max().item() == pytest.approx(0.5 * largest, rel=1e-2)
    with pytest.raises(ConfigError, match="--layers must be between 1 and 2, got 3"):
        write_gguf(
            str(tiny), StorageTypes("F16", "Q8_0"), tmp_path / "no.gguf", Weights(num_layers=3)
        )


@pytest.mark.slow
@pytest.mark.usefixtures("default_gguf")
def test_pairs_are_measured_and_tokens_compared(tiny: Path, tmp_path: Path) -> None:
    config = PairConfig(
        shape=str(tiny),
        work=tmp_path / "made",
        draft_layers=1,
        num_requests=1,
        prompt_tokens=8,
        output_tokens=12,
        repeat=2,
    )
    record = draft_pairs(config, print)
    assert [row["draft"] for row in record.rows] == ["agreeing", "unrelated"]
    for row in record.rows:
        assert set(COLUMNS["draft_pairs"]) <= {*row, *_joined(row)}
        assert len(row["on_seconds"]) == len(row["off_seconds"]) == 2
    with pytest.raises(ConfigError, match="must be at least 1"):
        draft_pairs(replace(config, repeat=0), print)


def _joined(row: dict[str, object]) -> set[str]:
    """Keys of columns that show two figures."""
    return {key for key in COLUMNS["draft_pairs"] if set(key.split("/")) <= set(row)}
