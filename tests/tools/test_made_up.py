"""Random weights as a GGUF: the shape of a config.json, in a type of one's choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.conftest import CONFIG, Windlass
from windlass import LLM, SamplingParams
from windlass.models.gguf_header import read_header


@pytest.mark.usefixtures("default_gguf")
def test_it_has_the_shape_and_can_be_served(tiny: Path, tmp_path: Path, windlass: Windlass) -> None:
    made = tmp_path / "made.gguf"
    said = windlass("bench", "gguf", tiny, "--type", "Q4_0", "-o", made)
    assert f"written to {made}" in said
    header = read_header(made)
    assert header.metadata["llama.feed_forward_length"] == CONFIG["intermediate_size"]
    kinds = {name: tensor.type.name for name, tensor in header.tensors.items()}
    assert (kinds["blk.1.ffn_down.weight"], kinds["output.weight"]) == ("Q4_0", "Q8_0")
    llm = LLM(str(made), max_model_len=64)
    result = llm.generate(["Hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == 5


@pytest.mark.usefixtures("default_gguf")
def test_types_that_no_tool_rounds_to_are_random_blocks(tmp_path: Path, windlass: Windlass) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "hidden_size": 256, "intermediate_size": 256})
    )
    made = tmp_path / "made.gguf"
    windlass("bench", "gguf", tmp_path, "--type", "IQ2_XXS", "--head-type", "IQ4_NL", "-o", made)
    kinds = {name: tensor.type.name for name, tensor in read_header(made).tensors.items()}
    assert (kinds["blk.1.ffn_down.weight"], kinds["token_embd.weight"]) == ("IQ2_XXS", "IQ4_NL")
    llm = LLM(str(made), max_model_len=64)
    result = llm.generate(["Hello"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({}, "Q9_K", "--type 'Q9_K' is not known. Known: F16, Q4_0"),
        ({"hidden_size": 40}, "Q4_0", "hidden_size must be a multiple of 32"),
        ({"hidden_size": 32}, "IQ2_XXS", "hidden_size must be a multiple of 256"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Q8_0", "is a Qwen3ForCausalLM"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, windlass: Windlass, changes: dict[str, object], kind: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    made = tmp_path / "made.gguf"
    assert said in windlass("bench", "gguf", tmp_path, "--type", kind, "-o", made, code=2)
    assert not made.exists()
