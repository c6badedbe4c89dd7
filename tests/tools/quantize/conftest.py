"""A tiny model with a tokenizer, calibration texts, and the command line in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from windlass.cli.main import app

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

Quantize = Callable[..., str]


def tiny_tensors(config: dict[str, object] = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with outlier features, as in real networks."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])  # type: ignore[call-overload]
    dim = int(config["head_dim"])  # type: ignore[call-overload]
    heads = int(config["num_attention_heads"]) * dim  # type: ignore[call-overload]
    kv = int(config["num_key_value_heads"]) * dim  # type: ignore[call-overload]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "model.embed_tokens.weight": normal(256, hidden) * 8,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(256, hidden) * 3,
    }
    for layer in range(int(config["num_hidden_layers"])):  # type: ignore[call-overload]
        own = f"model.layers.{layer}."
        norm = torch.ones(hidden)
        norm[:: hidden // 4] = 8.0
        tensors |= {
            own + "input_layernorm.weight": norm,
            own + "post_attention_layernorm.weight": norm.flip(0),
            own + "self_attn.q_proj.weight": normal(heads, hidden),
            own + "self_attn.k_proj.weight": normal(kv, hidden),
            own + "self_attn.v_proj.weight": normal(kv, hidden),
            own + "self_attn.o_proj.weight": normal(hidden, heads),
            own + "mlp.gate_proj.weight": normal(inner, hidden),
            own + "mlp.up_proj.weight": normal(inner, hidden),
            own + "mlp.down_proj.weight": normal(hidden, inner),
        }
    return {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}


def write_model(folder: Path, **changes: object) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(config), folder / "model.safetensors")
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def small_gguf(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random layer with the tokenizer and chat template of the default model."""
    from random_gguf import StorageTypes, write_gguf

    del default_gguf  # write_gguf reads it
    folder = tmp_path_factory.mktemp("gguf")
    changes = {"hidden_size": 192, "num_hidden_layers": 1, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    write_gguf(str(folder), StorageTypes("Q4_1", "Q8_0"), folder / "small.gguf")
    return folder / "small.gguf"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts and conversations of random words."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    words = random.Random(0)
    lines = []
    for number in range(40):
        text = " ".join(words.choice(["wind", "lass", "lifts", "a", "load"]) for _ in range(20))
        if number % 4 == 0:
            lines.append({"messages": [{"role": "user", "content": text}]})
        else:
            lines.append({"text": text, "label": "prose"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def quantize() -> Quantize:
    """Run the command, check its exit code, and return its output."""

    def invoke(*args: object, code: int = 0, device: str = "cpu") -> str:
        words = ["quantize", *map(str, args), "--no-progress", "--device", device]
        result = CliRunner().invoke(app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    return invoke
