"""Tiny random networks of every architecture against transformers: the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.steps import make_batch
from windlass.core.sampling import SamplingParams
from windlass.core.types import Row, SlotInit, StepPlan
from windlass.kernels.batch import Heads, KVCache
from windlass.kernels.ops import choose_ops
from windlass.kernels.select import Need, select
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import Parts, kv_layout, make_network
from windlass.quant.unquantised import Unquantised
from windlass.runner.slots import SlotTables

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama2": ("Llama", {"num_key_value_heads": 6}),
    "llama3": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mistral-head-dim": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_scaling": YARN_ROPE}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def save_tiny(name: str, folder: Path) -> torch.nn.Module:
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1 if "norm" in key else 0.15)
    model.save_pretrained(folder)
    return model


def our_logits(
    folder: Path, ids: list[int], chunks: list[int], plain: bool = False
) -> torch.Tensor:
    """Logits of all positions, computed in chunks, with shuffled KV blocks."""
    spec = HParams.from_hf(json.loads((folder / "config.json").read_text()))
    heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    ops = choose_ops(Need(CPU, torch.float32, heads, spec.rope.dim, plain=plain))
    parts = Parts(torch.float32, CPU, 128, ops, lambda _, __: Unquantised(torch.float32))
    network = make_network(spec, parts)
    load(network, SafetensorsCheckpoint(sorted(folder.glob("*.safetensors"))), CPU)
    layout = kv_layout(spec, 4, torch.float32)
    num_groups = len(layout.groups)
    cache = KVCache(layout, 16 * num_groups, torch.float32, CPU)
    slots = SlotTables(1, 16, 4, CPU, num_groups=num_groups)
    admission = SlotInit("r", 0, ids, len(ids), SamplingParams(), frozenset(), 0)
    free = [5, 3, 9, 1, 0, 15, 7, 2, 4, 6, 8, 10, 11, 12, 13, 14]
    outputs, start, held = [], 0, 0
    with torch.inference_mode():
        for count in chunks:
            need_blocks = -(-(start + count) // 4)
            fresh = free[held:need_blocks]
            blocks = tuple(block * num_groups + i for i in range(num_groups) for block in fresh)
            held = need_blocks
            row = Row("r", 0, start, count, tuple(ids[start : start + count]), blocks, True)
            plan = StepPlan([row], [admission] if start == 0 else [])
            tokens, batch = make_batch(plan, slots, cache.layers)
            outputs.append(network.logits(network(tokens, batch)))
            start += count
    assert start == len(ids)
    return torch.cat(outputs)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save_tiny(name, tmp_path)
    ids = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30], [1] * 37):
        got = our_logits(tmp_path, ids.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.1, "the logits are too small for the comparison to mean anything"


def test_reference_attention_gives_the_same_logits(tmp_path: Path) -> None:
    model = save_tiny("mistral-window", tmp_path)
    ids = torch.arange(3, 40)
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    got = our_logits(tmp_path, ids.tolist(), [20, 17], plain=True)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_kernels_report_why_they_are_unsupported() -> None:
    need = Need(CPU, torch.float32, Heads(4, 2, 16), 16, soft_cap=30.0)
    chosen = select("attention", need)
    assert chosen.name == "plain"
    assert "soft cap" in chosen.reason
    assert "CUDA" in chosen.refusals["triton"]
