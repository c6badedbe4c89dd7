"""Models without a network of their own run through transformers' code: the same logits and tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.models.comparison import TINY, our_logits
from tests.steps import make_batch
from windlass import LLM, SamplingParams
from windlass.build import open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.core.types import Row, SlotInit, StepPlan
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.kernels.batch import KVCache
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.network import kv_layout
from windlass.models.source import resolve
from windlass.runner.load import load_network
from windlass.runner.slots import SlotTables

ROOT = Path(__file__).parents[2]
SIZES = TINY | {"hidden_size": 48, "num_hidden_layers": 2, "head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
# Names of fields that differ from those of SIZES.
CASES: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {"hidden_act": "relu2"},
    "BitNet": {},
    "Ernie4_5": {},
    "GPTBigCode": {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 128, "n_inner": 80},
    "GPTNeoX": {"num_key_value_heads": None, "rotary_pct": 0.25, "use_parallel_residual": True},
    "GraniteMoe": EXPERTS | {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "GraniteSWA": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "Helium": {},
    "HunYuanDenseV1": {
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 1000.0,
            "factor": 1.0,
        }
    },
    "NanoChat": {},
    "OPT": {"ffn_dim": 80, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    "Persimmon": {"num_key_value_heads": None},
    "SeedOss": {},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "VaultGemma": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}
PROMPTS = [[3 + (7 * i + j) % 90 for j in range(1 + 6 * i)] for i in range(5)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def save(family: str, folder: Path, changes: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """A model of transformers with random weights and a tokenizer, saved to the folder."""
    sizes = SIZES | CASES.get(family, {}) | (changes or {})
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and parameter.ndim == 1
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
    model.save_pretrained(folder)
    Tokenizer(WordLevel({f"t{i}": i for i in range(97)}, "t0")).save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("family", CASES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    ids = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30]):
        got = our_logits(tmp_path, ids.tolist(), chunks, model_impl="transformers")
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.1, "the logits are too small for the comparison to mean anything"


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)]


def start(folder: Path, **options: Any) -> LLM:
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 10}
    return LLM(str(folder), device="cpu", **(sizes | {"model_impl": "transformers"} | options))


def test_batches_in_odd_chunks_give_transformers_tokens(tmp_path: Path) -> None:
    model = save("SeedOss", tmp_path)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    llm = start(tmp_path)
    assert tokens_of(llm) == expected
    assert tokens_of(llm) == expected  # from the prefix cache
    assert llm.generate(PROMPTS[-1:], GREEDY)[0].num_cached > 0
    lines = {choice.what: choice for choice in llm.report.choices}
    assert lines["network"].value == "transformers' SeedOssForCausalLM, operator by operator"
    assert lines["steps"].reason == "transformers' own code computes the layers"


def test_windows_free_blocks_and_keep_tokens(tmp_path: Path) -> None:
    model = save("VaultGemma", tmp_path)
    llm = start(tmp_path)
    assert tokens_of(llm) == [greedy(model, prompt) for prompt in PROMPTS]


def test_speculation_keeps_tokens(tmp_path: Path) -> None:
    model = save("OPT", tmp_path / "opt")
    save("Arcee", tmp_path / "draft")
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    for options in ({"spec": "ngram"}, {"spec": "draft", "spec_model": str(tmp_path / "draft")}):
        llm = start(tmp_path / "opt", spec_tokens=3, **options)
        assert tokens_of(llm) == expected


def test_draft_heads_read_the_inputs_of_layers(tmp_path: Path) -> None:
    model, ids = save("SeedOss", tmp_path), torch.arange(3, 10)
    config = EngineConfig.of(model=str(tmp_path), device="cpu", model_impl="transformers")
    opened = open_model(config)
    checkpoint = open_checkpoint(opened.files, config.model)
    network = load_network(config, opened.hparams, checkpoint).network
    layout = kv_layout(opened.hparams, 16, torch.float32)
    cache = KVCache(layout, 1, torch.float32, torch.device("cpu"))
    admission = SlotInit("r", 0, ids.tolist(), len(ids), SamplingParams(), frozenset(), 0)
    row = Row("r", 0, 0, len(ids), tuple(ids.tolist()), (0,), True)
    slots = SlotTables(1, 1, 16, torch.device("cpu"))
    tokens, batch = make_batch(StepPlan([row], [admission]), slots, cache.layers)
    read = {0: tokens, 1: tokens}
    with torch.inference_mode():
        network(tokens, batch, read)
        want = model(ids[None], output_hidden_states=True).hidden_states
    for layer, got in read.items():
        torch.testing.assert_close(got, want[layer][0], atol=1e-4, rtol=1e-4)


def test_other_architectures_run_through_transformers_by_default(tmp_path: Path) -> None:
    save("BitNet", tmp_path)
    assert hparams_of(tmp_path).transformers is not None
    with pytest.raises(UnsupportedError, match="'BitNetForCausalLM' is not supported"):
        hparams_of(tmp_path, model_impl="windlass")


def test_own_architectures_may_run_through_transformers(tmp_path: Path) -> None:
    save("Llama", tmp_path)
    ids = list(range(3, 40))
    own = our_logits(tmp_path, ids, [30, 7])
    other = our_logits(tmp_path, ids, [30, 7], model_impl="transformers")
    torch.testing.assert_close(other, own, atol=1e-4, rtol=1e-4)
    assert hparams_of(tmp_path).transformers is None
    assert hparams_of(tmp_path, model_impl="transformers").transformers is not None


def test_linear_layers_are_quantised(tmp_path: Path) -> None:
    save("SeedOss", tmp_path, {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
    llm = start(tmp_path, quantization="int8")
    lines = {choice.what: choice.value for choice in llm.report.choices}
    assert len(tokens_of(llm)) == len(PROMPTS)
    assert "14 of them" in lines["int8 weights"]


def hparams_of(folder: Path, **options: Any) -> Any:
    config = ModelConfig(model=str(folder), **options)
    return load_hparams(resolve(config), config)


REFUSED = {
    "bloom": ({}, "does not go through transformers' attention functions"),
    "falcon": (
        {"alibi": True, "head_dim": None},
        "does not go through transformers' attention functions",
    ),
    "mamba": ({}, r"keeps other state than keys and values.* nearest that runs is Granite 4 H"),
    "olmo_hybrid": ({}, r"keeps other state than keys and values"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "types conv keep other state"),
    "bart": (
        {"is_encoder_decoder": False, "is_decoder": True, "decoder_layers": 2},
        "takes no position_ids",
    ),
    "bigbird_pegasus": ({}, "is an encoder-decoder model"),
    "diffllama": ({}, "attends more than once"),
    "bert": ({"is_decoder": True}, "tied LM head"),
    "youtu": (
        {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16},
        "keys have 16 features and its values 8",
    ),
    "deepseek_v32": ({}, "types indexed_attention keep other state"),
    "moshi": ({}, "reads more than text"),
    "apertus": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            }
        },
        "depends on the longest sequence",
    ),
    "t5": ({}, "not a causal language model of transformers"),
    "clip": ({}, "not a causal language model of transformers"),
    "nothing": ({}, "neither an architecture of Windlass nor of the installed transformers"),
    "chatglm": (
        {"auto_map": {"AutoConfig": "code.Config"}},
        "is never executed.* nearest that runs is the version whose name ends with -hf",
    ),
    "gptj": ({}, "The nearest that runs is Pythia"),
    "remote": ({"auto_map": {"AutoConfig": "code.Config"}}, "is never executed"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[model_type]
    values = SIZES | {"model_type": model_type} | changes
    given = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(UnsupportedError, match=reason) as caught:
        hparams_of(tmp_path, load_format="dummy", model_impl="transformers")
    assert "config.json" in str(caught.value)


def test_wrong_sizes_are_an_error_of_the_config(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "seed_oss", "hidden_size": "many"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="transformers cannot read it"):
        hparams_of(tmp_path, load_format="dummy", model_impl="transformers")


def test_other_state_is_found_with_the_weights(tmp_path: Path, monkeypatch: Any) -> None:
    """A token that depends on its neighbour, or counts positions itself, is noticed at the start."""
    save("SeedOss", tmp_path)
    layer = transformers.models.seed_oss.modeling_seed_oss.SeedOssMLP
    compute = layer.forward
    monkeypatch.setattr(layer, "forward", lambda mlp, x: compute(mlp, x + x.roll(1, dims=1)))
    with pytest.raises(UnsupportedError, match="depend on"):
        our_logits(tmp_path, [3, 4], [2], model_impl="transformers")
    monkeypatch.setattr(layer, "forward", compute)
    rotary = transformers.models.seed_oss.modeling_seed_oss.SeedOssRotaryEmbedding
    rotate = rotary.forward
    monkeypatch.setattr(
        rotary,
        "forward",
        lambda module, x, position_ids: rotate(
            module, x, torch.arange(x.shape[1], device=x.device)[None] + 0 * position_ids
        ),
    )
    with pytest.raises(UnsupportedError, match="depend on their place"):
        our_logits(tmp_path, [3, 4], [2], model_impl="transformers")


def test_features_without_transformers_code_are_refused(tmp_path: Path) -> None:
    save("SeedOss", tmp_path)
    with pytest.raises(UnsupportedError, match="--enable-lora: SeedOssForCausalLM"):
        start(tmp_path, enable_lora=True)
    with pytest.raises(ConfigError, match="--spec self: SeedOssForCausalLM"):
        start(tmp_path, spec="self")
    llm = start(tmp_path)
    with pytest.raises(Exception, match="transformers' own code"):
        llm.generate([PROMPTS[1]], replace(GREEDY, deterministic=True))


def test_transformers_must_be_installed(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "seed_oss"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'windlass-llm\[transformers\]'"):
        hparams_of(tmp_path, load_format="dummy", model_impl="transformers")


def test_the_documentation_lists_the_compared_architectures() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for family in CASES:
        assert f"{family}ForCausalLM" in page, f"docs/models.md does not name {family}"
