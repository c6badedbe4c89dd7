"""Compares tiny random networks with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.steps import make_batch
from windlass.config import ModelConfig, ModelImpl
from windlass.core.sampling import SamplingParams
from windlass.core.types import Row, SlotInit, StepPlan
from windlass.kernels.batch import KVCache
from windlass.kernels.ops import choose_ops
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import Parts, kernel_need, kv_layout, make_network
from windlass.models.source import resolve
from windlass.models.stages import Stage
from windlass.parallel.mesh import Mesh
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
    "pad_token_id": 0,
}


def save_tiny(family: str, changes: dict[str, Any], folder: Path) -> torch.nn.Module:
    """A model of transformers with random weights, saved to the folder."""
    kind = getattr(transformers, family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM"))
    torch.manual_seed(1)
    # transformers changes the dictionaries in its arguments.
    model = kind(kind.config_class(**deepcopy({**TINY, **changes}))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key or "ln_" in key
            parameter.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.15)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


def our_logits(
    folder: Path,
    ids: list[int],
    chunks: list[int],
    plain: bool = False,
    model_impl: ModelImpl = "windlass",
) -> torch.Tensor:
    """Logits of all positions from a folder of safetensors or a GGUF file; see `logits_of`."""
    config = ModelConfig(model=str(folder), model_impl=model_impl)
    files = resolve(config)
    spec, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    return logits_of(spec, checkpoint, ids, chunks=chunks, plain=plain)


def make_parts(spec: HParams, plain: bool = False, mesh: Mesh | None = None) -> Parts:
    need = kernel_need(spec, device=CPU, dtype=torch.float32, plain=plain, mesh=mesh)
    method = Unquantised(torch.float32)
    return Parts(
        torch.float32, CPU, 128, choose_ops(need), lambda _, __: method, mesh=mesh or Mesh()
    )


def logits_of(
    spec: HParams,
    checkpoint: Checkpoint,
    ids: list[int],
    *,
    chunks: list[int],
    plain: bool = False,
    stages: Sequence[Stage] = (),
    parts: Parts | None = None,
) -> torch.Tensor:
    """Logits of all positions, computed in chunks, with shuffled KV blocks."""
    parts = parts or make_parts(spec, plain)
    layout = kv_layout(spec, 4, torch.float32, parts.mesh)
    num_groups = len(layout.groups)
    networks, caches = [], []
    for stage in stages or [Stage(0, spec.num_layers, spec.num_layers)]:
        network = make_network(spec, replace(parts, stage=stage))
        load(network, checkpoint, CPU)
        network.check()
        networks.append(network)
        own = layout.stage(stage.layers)
        caches.append(KVCache(own, 16 * num_groups, torch.float32, CPU))
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
            x, batch = make_batch(plan, slots, caches[0].layers)
            for network, cache in zip(networks, caches, strict=True):
                x = network(x, replace(batch, kv=cache.layers))
            outputs.append(networks[-1].logits(x))
            start += count
    assert start == len(ids)
    return torch.cat(outputs)


def check_logits(family: str, changes: dict[str, Any], folder: Path) -> None:
    """Compare the logits of 37 positions, whole, in odd chunks and token by token."""
    model = save_tiny(family, changes, folder)
    ids = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30], [1] * 37):
        got = our_logits(folder, ids.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.1, "the logits are too small for the comparison to mean anything"
