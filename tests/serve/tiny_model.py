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
    if parallel.prefill_replicas:
        split = SplitPolicy(parallel.roles, parallel.min_prefill_tokens)
    with running(
        builds=builds, card=opened.card, engine=config, split=split, **(serve or {})
    ) as server:
        yield server
