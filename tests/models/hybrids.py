"""What tests of models with recurrent states check."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.comparison import logits_of, make_parts, our_logits
from tests.models.test_deepseek import COUNT, PROMPTS, run
from tests.models.test_dense_gguf import IDS, _llama_cpp_logits
from tests.quant.ranks import in_threads, thread_groups
from tests.runner.test_windows import make, transformers_tokens
from windlass.config import ModelConfig
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.network import kv_layout
from windlass.models.source import resolve
from windlass.models.stages import Stage
from windlass.parallel.mesh import Mesh

needs_llama_cpp = pytest.mark.skipif(
    all(find_spec(name) is None for name in ("llama_cpp", "xllamacpp")),
    reason="llama.cpp is not installed",
)
PATHS: list[dict[str, Any]] = [{}, {"plain_kernels": True}, {"enforce_eager": True}]


def check_tokens(model: torch.nn.Module, folder: Path, num_scarce: int, **options: Any) -> None:
    """The tokens of transformers: in batches, from a cached prefix, and after preemption.

    `num_scarce`: blocks that do not hold all requests.
    """
    want = [transformers_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    built = make(folder, dtype="float32", num_blocks=200, **options)
    assert run(built, PROMPTS) == want
    hits = built.engine.stats().prefix_hits
    assert run(built, PROMPTS[:1]) == want[:1]
    assert built.engine.stats().prefix_hits - hits == 28  # whole blocks of the 30 tokens
    scarce = make(folder, dtype="float32", num_blocks=num_scarce, **options)
    assert run(scarce, PROMPTS) == want
    assert scarce.engine.stats().num_preemptions > 0


def check_state_of_each_block(model: torch.nn.Module, folder: Path, deterministic: bool) -> None:
    """One step computes the prompt; a shorter prompt continues from a block in its middle."""
    built = make(folder, dtype="float32", num_blocks=200, max_num_batched_tokens=64)
    run(built, [PROMPTS[0]], deterministic=deterministic)
    for length in (13, 16):
        hits = built.engine.stats().prefix_hits
        other = [*PROMPTS[0][:length], 7, 9]
        assert run(built, [other], deterministic=deterministic) == [
            transformers_tokens(model, other, COUNT)
        ]
        assert built.engine.stats().prefix_hits - hits == length // 4 * 4


def check_recorded_steps(folder: Path) -> None:
    """A step is one native call, with the bits of an eager step."""
    recorded = make(folder, num_blocks=200)
    steps = next(each for each in recorded.report.choices if each.what == "steps")
    assert steps.value.startswith("one native call")
    eager = make(folder, num_blocks=200, enforce_eager=True)
    assert run(recorded, PROMPTS, logprobs=1) == run(eager, PROMPTS, logprobs=1)


def logits_by(model: torch.nn.Module) -> torch.Tensor:
    """The logits of transformers for IDS."""
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS[None]).logits[0]
    return logits


def check_ranks_and_stages(model: torch.nn.Module, path: Path) -> None:
    """Two ranks, which divide the states, and two pipeline stages."""
    config = ModelConfig(model=str(path))
    files = resolve(config)
    hparams, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    parts = make_parts(hparams, True)
    ranks = [replace(parts, mesh=Mesh(group)) for group in thread_groups(2)]
    part, whole = (kv_layout(hparams, 4, torch.float16, each.mesh) for each in (ranks[0], parts))
    assert whole.state_bytes / 2 <= part.state_bytes < whole.state_bytes
    given = partial(logits_of, hparams, checkpoint, IDS.tolist(), chunks=[30, 7])
    found = in_threads([partial(given, parts=rank) for rank in ranks])
    assert len(found) == 2
    count = hparams.num_layers
    stages = [Stage(0, 1, count), Stage(1, count, count)]
    for got in (*found, given(stages=stages)):
        torch.testing.assert_close(got, logits_by(model), atol=1e-4, rtol=1e-4)


def gguf_logits(path: Path) -> torch.Tensor:
    return our_logits(path, IDS.tolist(), [30, 7])


def check_llama_cpp(model: torch.nn.Module, path: Path, tolerance: float = 0.005) -> None:
    """The logits of llama.cpp, whose KV cache has 16 bits."""
    want = logits_by(model)
    got = torch.from_numpy(_llama_cpp_logits(path))
    error = (got - want).square().mean().sqrt() / want.std()
    assert error < tolerance, f"relative error {error:.4f}"


UNQUANTISED = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight", ".gate.weight")


def quantise_fp8(model: torch.nn.Module, folder: Path, skipped: list[str]) -> None:
    """Quantise the matrices of a checkpoint to fp8 with a scale per row, and give them to the model."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    ignored, weights = ["lm_head"], model.state_dict()
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if weight.ndim != 2 or name.endswith(UNQUANTISED):
            continue
        if any(f"{skip}." in name for skip in skipped):
            ignored.append(module)
            continue
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = scale
        own = name.replace("backbone.", "model.")  # of Nemotron-H in files
        weights[own].copy_(tensors[name].float() * scale)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ignored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fp8}},
    }
    (folder / "config.json").write_text(json.dumps(config))
