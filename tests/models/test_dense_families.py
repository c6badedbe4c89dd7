"""Tiny random networks of the dense families against transformers: the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.models.comparison import TINY, check_logits, our_logits, save_tiny
from windlass import LLM, SamplingParams
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.registry import read_hparams
from windlass.models.rope import frequencies

LAYERS = {"num_hidden_layers": 4}
ONE_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MINISTRAL_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.5, 2.0, 3.0, 4.0]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
NO_GROUPS = {"num_key_value_heads": 6}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.5,
    "logits_scaling": 0.25,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere-qk-norm": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**LAYERS, "sliding_window": 8, "logit_scale": 0.5}),
    "exaone4-windows": ("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 3}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "falcon3": ("Llama", {"head_dim": 16}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt2": ("GPT2", {**NO_GROUPS, "n_inner": 80}),
    "gpt-neox": ("GPTNeoX", {**NO_GROUPS, "hidden_size": 96}),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {**NO_GROUPS, "hidden_size": 96, "use_parallel_residual": False, "rotary_pct": 0.5},
    ),
    "granite": ("Granite", {**MULTIPLIERS, "tie_word_embeddings": True}),
    "granite-bias": ("Granite", {**MULTIPLIERS, "attention_bias": True, "mlp_bias": True}),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **MULTIPLIERS,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "mamba_n_heads": 2,
        },
    ),
    "ministral": ("Ministral", {"sliding_window": 8, "layer_types": ONE_FULL, "head_dim": 16}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": MINISTRAL_YARN,
        },
    ),
    "mistral-nemo": ("Mistral", {"sliding_window": None, "head_dim": 16, "rope_theta": 1e6}),
    "nemotron": ("Nemotron", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**LAYERS, "sliding_window": 8}),
    "olmo3-yarn": (
        "Olmo3",
        {"sliding_window": 8, "layer_types": ONE_FULL, "rope_scaling": YARN, "rope_theta": 5e5},
    ),
    "phi": ("Phi", {"hidden_act": "gelu_new"}),
    "phi3-window": ("Phi3", {"sliding_window": 8}),
    "phi3-long": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3-short": (
        "Phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "phi4-mini": (
        "Phi3",
        {
            "partial_rotary_factor": 0.5,
            "rope_scaling": {**LONGROPE, "short_factor": SHORT[:2], "long_factor": LONG[:2]},
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3", LAYERS),
    "smollm3-windows": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "hidden_size": 96}),
    "stablelm-12b": (
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 96},
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": 8}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(*CASES[name], tmp_path)


def test_short_factors_of_longrope_apply_if_contexts_are_short() -> None:
    values = {**TINY, "architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE}
    rope = read_hparams({**values, "original_max_position_embeddings": 16}).rope
    short, long = (frequencies(rope, length)[0] for length in (16, 17))
    torch.testing.assert_close(long * torch.tensor(LONG), short * torch.tensor(SHORT))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm is true; only false"),
        ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights is false; only"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention is true; only"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "a number is supported"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["attention"]}, "layer_types has 1 layers"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "ntk"}}, "rope type 'ntk'"),
        ("NemotronForCausalLM", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers has 1 layers"),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
    ],
)
def test_unsupported_variants_are_rejected(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        read_hparams({**TINY, "architectures": [architecture], **changes})


def test_gpt2_files_without_a_prefix_load(tmp_path: Path) -> None:
    name, changes = CASES["gpt2"]
    model = save_tiny(name, changes, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file)
    ids = list(range(3, 40))
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(our_logits(tmp_path, ids, [37]), want, atol=1e-4, rtol=1e-4)


def test_a_missing_head_norm_is_reported(tmp_path: Path) -> None:
    save_tiny(*CASES["stablelm-12b"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_layernorm.norms.1.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.k_norm.* 1 parts, .* needs 2"):
        our_logits(tmp_path, [3], [1])


_FEW_BLOCKS = {"olmo3": 44, "cohere2": 44, "glm4": 16, "ministral3": 16}


@pytest.mark.parametrize("name", _FEW_BLOCKS)  # post, parallel, sandwich, growing scores
def test_chunks_prefixes_and_preemptions_keep_the_tokens(name: str, tmp_path: Path) -> None:
    """Prompts are longer than the windows, and the KV cache too small for three at once."""
    model = save_tiny(*CASES[name], tmp_path)
    vocabulary = {f"t{i}": i for i in range(97)}
    Tokenizer(WordLevel(vocabulary, "t0")).save(str(tmp_path / "tokenizer.json"))
    ids = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[:25], [*ids[:21], 5, 6, 7], ids[10:30], ids[5:18]]
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 12, "do_sample": False}
    want = [
        model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for num_blocks in (100, _FEW_BLOCKS[name]):
        llm = LLM(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            block_size=4,
            num_blocks=num_blocks,
            max_model_len=48,
            max_num_seqs=3,
            max_num_batched_tokens=7,
        )
        for _ in range(2):
            results = llm.generate(prompts, greedy)
            assert [list(result.outputs[0].token_ids) for result in results] == want
        stats = llm.engine.stats()
        assert stats.prefix_hits > 0
        assert (stats.num_preemptions > 0) == (num_blocks < 100)
