"""Gemma 1, 2 and 3: the logits of transformers, GGUF files, windows, prefixes and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.lora.folders import write_adapter
from tests.models.comparison import TINY, check_logits, logits_of, our_logits, save_tiny
from tests.models.tiny import TOKENIZER, write_gguf
from windlass import LLM, SamplingParams
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig, ModelConfig
from windlass.errors import UnsupportedError
from windlass.lora.modules import linear_shapes
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.tools.plan import select_quantization
from windlass.tools.quantize.export import export

WINDOWS = {"sliding_window": 8, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 24}
SOFT_CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3 = WINDOWS | {"sliding_window_pattern": 3, "rope_scaling": LINEAR}
CASES = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma-old-activation": ("Gemma", {"head_dim": 16, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2", WINDOWS | SOFT_CAPS),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-untied": ("Gemma3", WINDOWS | {"tie_word_embeddings": False}),
}
IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_logits(*CASES[name], tmp_path)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_vision_tensors_are_ignored(tmp_path: Path, prefix: str) -> None:
    """Checkpoints with a vision part have one of two prefixes, depending on the library's version."""
    from safetensors.torch import load_file, save_file

    model = save_tiny(*CASES["gemma3"], tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    file = tmp_path / "model.safetensors"
    tensors = {prefix + name.removeprefix("model."): t for name, t in load_file(file).items()}
    tensors["model.vision_tower.post_layernorm.weight"] = torch.ones(3)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(3)
    save_file(tensors, file)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"eos_token_id": [1, 106]}))
    got = our_logits(tmp_path, IDS.tolist(), [37])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_old_and_new_configs_agree() -> None:
    new = transformers.Gemma3TextConfig(**{**TINY, **GEMMA3}).to_dict()
    new |= {"architectures": ["Gemma3ForCausalLM"]}
    old = {name: new[name] for name in TINY} | GEMMA3 | {"model_type": "gemma3_text"}
    old |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    found, wanted = read_hparams(old), read_hparams(new)
    assert found.layer_ropes == wanted.layer_ropes
    assert found.sliding_windows == wanted.sliding_windows == (8, 8, None, 8)
    assert [rope.theta for rope in wanted.layer_ropes if rope] == [1e4, 1e4, 1e6, 1e4]
    assert [rope.factor for rope in wanted.layer_ropes if rope] == [1.0, 1.0, 8.0, 1.0]
    assert found.max_positions == TINY["max_position_embeddings"]


def test_configs_of_large_models_leave_out_fields() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    hparams = read_hparams(config | {"eos_token_id": [1, 106], "torch_dtype": "bfloat16"})
    assert (hparams.num_heads, hparams.num_kv_heads, hparams.head_dim) == (8, 4, 256)
    assert (hparams.vocab_size, hparams.max_positions) == (262_208, 131_072)
    assert (hparams.eos_ids, hparams.dtype) == ((1, 106), "bfloat16")
    assert hparams.sliding_windows.count(None) == 5


def test_embedding_models_are_refused() -> None:
    config = {**TINY, **WINDOWS, "architectures": ["Gemma3ForCausalLM"]}
    with pytest.raises(UnsupportedError, match="embedding model"):
        read_hparams(config | {"use_bidirectional_attention": True})


# ---- GGUF -------------------------------------------------------------------------------------

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PRE = {"post_attention_layernorm": "ffn_norm"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gemma_gguf(
    path: Path, architecture: str, model: torch.nn.Module, **metadata: Any
) -> Path:
    """The model as llama.cpp's converter stores it: norm weights are 1 + w."""
    names = _NAMES | (_PRE if architecture == "gemma" else _SANDWICH)
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        values = parameter.detach() + (1.0 if module.endswith("norm") else 0.0)
        if module in _OUTER:
            tensors[f"{_OUTER[module]}.weight"] = values.numpy()
        else:
            _, _, layer, inner = module.split(".", 3)
            tensors[f"blk.{layer}.{names[inner]}.weight"] = values.numpy()
    config = model.config
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **metadata,
    }
    keyed = {f"{architecture}.{key}": value for key, value in values.items()}
    return write_gguf(path, architecture, tensors=tensors, metadata=keyed | TOKENIZER)


GGUF_CASES = {
    "gemma": ("Gemma", {"head_dim": 16}, {"rope.freq_base": 10000.0}),
    "gemma2": (
        "Gemma2",
        {**WINDOWS, "query_pre_attn_scalar": 16},
        {"rope.freq_base": 10000.0, "attention.sliding_window": 8},
    ),
    "gemma3": (
        "Gemma3",
        {**WINDOWS, "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "rope_scaling": LINEAR},
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 8,
        },
    ),
}


@pytest.mark.parametrize("architecture", GGUF_CASES)
def test_gguf_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    family, changes, metadata = GGUF_CASES[architecture]
    model = save_tiny(family, changes, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    path = write_gemma_gguf(tmp_path / "model.gguf", architecture, model, **metadata)
    checkpoint = GGUFCheckpoint(path)
    hparams = read_hparams(checkpoint.hf_config(), str(path))
    got = logits_of(hparams, checkpoint, IDS.tolist(), chunks=[20, 17])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gguf_of_the_27b_models_scales_scores_by_another_size(tmp_path: Path) -> None:
    changes = {**WINDOWS, "num_hidden_layers": 1}
    model = save_tiny("Gemma3", changes, tmp_path)
    path = write_gemma_gguf(
        tmp_path / "m.gguf", "gemma3", model, **{"block_count": 62, "attention.sliding_window": 8}
    )
    config = GGUFCheckpoint(path).hf_config()
    assert config["query_pre_attn_scalar"] == TINY["hidden_size"] // TINY["num_attention_heads"]


# ---- engines ----------------------------------------------------------------------------------

GREEDY = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
_START = IDS.tolist()[:30]
PROMPTS = [_START, [*_START[:21], 5, 6, 7], IDS.tolist()[5:20], _START]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def greedy(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of transformers."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(GREEDY.max_tokens or 0):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def tokens(llm: LLM, adapter: str = "") -> list[list[int]]:
    results = llm.generate(PROMPTS, GREEDY, adapter=adapter)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_chunks_prefixes_and_windows_keep_the_tokens(name: str, tmp_path: Path) -> None:
    """Prompts longer than the window, with shared starts, in odd chunks, then from the prefix cache."""
    model = save_tiny(*CASES[name], tmp_path)
    write_tokenizer(tmp_path)
    want = greedy(model, PROMPTS)
    options = {"device": "cpu", "dtype": "float32", "block_size": 4}
    for step_tokens in (64, 7, 5):
        llm = LLM(
            str(tmp_path),
            max_num_batched_tokens=step_tokens,
            num_blocks=200,
            max_num_seqs=3,
            **options,
        )
        assert tokens(llm) == want
        assert tokens(llm) == want
        assert llm.engine.stats().prefix_hits > 0


def test_adapters_of_attention_and_mlp(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    model = save_tiny(*CASES["gemma3"], folder)
    write_tokenizer(folder)
    base = greedy(model, PROMPTS)
    hparams = read_hparams(json.loads((folder / "config.json").read_text()))
    random, tensors = torch.Generator().manual_seed(1), {}
    for module, (num_out, num_in) in linear_shapes(hparams).items():
        if module == "lm_head":
            continue
        down = torch.randn(2, num_in, generator=random) * 0.3
        up = torch.randn(num_out, 2, generator=random) * 0.3
        key = f"base_model.model.{module}.lora_"
        tensors |= {f"{key}A.weight": down, f"{key}B.weight": up}
        with torch.no_grad():
            model.get_submodule(module).weight += 4 * up @ down  # alpha 8, rank 2
    adapter = write_adapter(tmp_path / "adapter", rank=2, tensors=tensors)
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        num_blocks=100,
        enable_lora=True,
        max_lora_rank=2,
        lora_modules=[f"a={adapter}"],
    )
    assert tokens(llm, "a") == greedy(model, PROMPTS)
    assert tokens(llm) == base


def test_plan_counts_the_bytes_of_the_engine(tmp_path: Path) -> None:
    model = save_tiny(*CASES["gemma3"], tmp_path)
    metadata = {"attention.sliding_window": 8, "rope.freq_base": 1e6}
    path = write_gemma_gguf(tmp_path / "model.gguf", "gemma3", model, **metadata)
    (tmp_path / "config.json").unlink()
    found = select_quantization(
        str(path),
        bandwidth=1e11,
        memory=2**30,
        concurrency=2,
        num_threads=1,
        context=40,
        kv_cache_dtype="auto",
        device="cpu",
    )
    (item,) = (each for each in found.candidates if each.format == "as stored")
    config = EngineConfig.of(model=str(path), num_threads=1, num_blocks=8, device="cpu")
    assert (
        build_engine(config, open_model(config).source).report.memory["weights"]
        == item.weight_bytes
    )


def test_exported_norms_are_stored_as_transformers_stores_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "base"
    save_tiny(*CASES["gemma3"], folder)
    write_tokenizer(folder)
    export(ModelConfig(model=str(folder)), tmp_path / "out")
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    for name, tensor in load_file(folder / "model.safetensors").items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
