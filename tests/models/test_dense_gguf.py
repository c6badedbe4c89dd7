"""GGUF files of the dense families: the logits of transformers, and those of llama.cpp if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from tests.models.comparison import logits_of, save_tiny
from tests.models.dense_gguf import write_model
from tests.models.test_dense_families import CASES
from windlass.models.families.registry import family_of, read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.tensor_rules import mapped

IDS = torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(2))
WINDOW = {"attention.sliding_window": 8}
GRANITE = {
    "attention.scale": 0.5,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_scale": 0.25,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
PATTERN = {"attention.sliding_window_pattern": [True, True, False]}
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("command-r", {"logit_scale": 0.5}),
    "cohere-qk-norm": ("command-r", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {**WINDOW, "logit_scale": 0.5}),
    "mistral-nemo": ("exaone", {}),  # the mathematics of EXAONE 3
    "exaone4-full": ("exaone4", {}),
    "exaone4-windows": ("exaone4", {**WINDOW, **PATTERN}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "gpt2": ("gpt2", {}),
    "gpt-neox": ("gptneox", {"use_parallel_residual": True}),
    "gpt-neox-sequential": ("gptneox", {"use_parallel_residual": False}),
    "granite": ("granite", GRANITE),
    "granite-bias": ("granite", GRANITE),
    "falcon3": ("internlm2", {}),  # the mathematics of both are Llama's
    "nemotron": ("nemotron", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", WINDOW),
    "olmo3-yarn": ("olmo2", {**WINDOW, **PATTERN, **YARN}),
    "phi": ("phi2", {}),
    "phi3-window": ("phi3", WINDOW),
    "phi3-long": (
        "phi3",
        {"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.322875624},
    ),
    "smollm3": ("smollm3", {}),
    "stablelm": ("stablelm", {}),
    "stablelm-12b": ("stablelm", {}),
    "starcoder2": ("starcoder2", WINDOW),
}


def _write(name: str, folder: Path) -> tuple[torch.nn.Module, Path]:
    model = save_tiny(*CASES[name], folder)
    architecture, metadata = FILES[name]
    return model, write_model(folder / "m.gguf", architecture, model, metadata)


@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model, path = _write(name, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    checkpoint = GGUFCheckpoint(path)
    hparams = read_hparams(checkpoint.hf_config(), str(path))
    rules = family_of(hparams.architecture).gguf.rules(hparams)
    got = logits_of(hparams, mapped(checkpoint, rules), IDS.tolist(), chunks=[30, 7])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# llama.cpp has norms of q and k in Command R+ only (64 layers), and takes each fourth layer of EXAONE 4
# as the full one. The windows of Phi 3 and StarCoder2 are not compared.
_NOT_COMPARED = ("cohere-qk-norm", "exaone4-windows", "phi3-window", "starcoder2")


@pytest.mark.skipif(
    all(find_spec(name) is None for name in ("llama_cpp", "xllamacpp")),
    reason="llama.cpp is not installed",
)
@pytest.mark.parametrize("name", [name for name in FILES if name not in _NOT_COMPARED])
def test_logits_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    model, path = _write(name, tmp_path)
    with torch.inference_mode():
        want = model(IDS[None]).logits[0]
    got = torch.from_numpy(_llama_cpp_logits(path))
    error = (got - want).square().mean().sqrt() / want.std()
    assert error < 0.005, f"relative error {error:.4f}"  # its KV cache has 16 bits


def _llama_cpp_logits(path: Path) -> NDArray[Any]:
    from llama_library import LlamaCpp, find_library

    library = LlamaCpp(find_library())
    model = library.load(path)
    context = library.context(model, rows=1, max_len=64, step_tokens=64, threads=1)
    batch = library.batch(len(IDS))
    batch.num_tokens = len(IDS)
    for i, token in enumerate(IDS.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert library.decode(context, batch) == 0
    logits = library.logits(context, len(IDS), library.vocab_size(model)).copy()
    library.free(context, batch)
    return logits
