"""A tiny Llama with FIM tokens, as a folder that transformers can read, too, and a server of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serve.conftest import Server, running
from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.serve.handover import SplitPolicy
from windlass.start import build_replicas

EOS = 256
FIM = {
    "prefix": "<|fim_prefix|>",
    "suffix": "<|fim_suffix|>",
    "middle": "<|fim_middle|>",
    "repo": "<|repo_name|>",
    "file": "<|file_sep|>",
    "pad": "<|fim_pad|>",
}
SPECIAL = ("</s>", *FIM.values())
FIM_IDS = {part: 257 + i for i, part in enumerate(FIM)}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a Llama of two layers with one token per byte and a few special tokens."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(alphabet) + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.15,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").unlink()
    return folder


def write_tiny_adapter(folder: Path, seed: int = 0) -> Path:
    """Write a LoRA adapter of that model which changes its tokens."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for target, width in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 64, generator=random)
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, 4, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@contextmanager
def serving(
    folder: Path, *, serve: dict[str, Any] | None = None, **options: Any
) -> Iterator[Server]:
    """Run a server of the model in `folder`; `serve`: options of the server."""
    options = {"device": "cpu", "dtype": "float32", "num_blocks": 200, "max_num_seqs": 8, **options}
    config = EngineConfig.of(model=str(folder), **options)
    opened = open_model(config)
    builds = build_replicas(config, opened.source)
    parallel = config.parallel
    split = None
    if "prefill" in parallel.roles:
        split = SplitPolicy(parallel.roles, parallel.min_prefill_tokens)
    with running(
        builds=builds,
        card=opened.card,
        engine=config,
        split=split,
        prefill_servers=parallel.prefill_addresses,
        secret=(parallel.cluster_secret or "").encode(),
        **(serve or {}),
    ) as server:
        yield server
