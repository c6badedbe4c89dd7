"""MTP layers of DeepSeek and GLM MoE models, against a reference of transformers' decoder layers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from tests.models.comparison import save_tiny
from tests.models.test_deepseek import EXPERTS, MLA, PROMPTS, V3, in_blocks
from tests.models.test_moe_families import GGUF_CASES, write_moe_gguf
from tests.models.test_networks import CASES as NETWORKS
from tests.runner.test_memory_owners import assert_complete, held
from tests.runner.test_windows import make as build
from tests.speculative.test_speculation import verify_all
from tests.steps import generate
from windlass import SamplingParams
from windlass.build import Built
from windlass.config import EngineConfig
from windlass.core.speculation import governor
from windlass.errors import ConfigError
from windlass.models.card import load_hparams
from windlass.models.mtp import MTP
from windlass.models.source import resolve
from windlass.speculative.registry import resolve_method

__all__ = ["verify_all"]

LAYERS, SIZE, VOCAB = 2, 48, 97
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("DeepseekV3", {**MLA, **EXPERTS, **V3}),
    "glm": NETWORKS["glm-4.5-moe"],
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, seed=3, top_k=20, ignore_eos=True, logprobs=1)


def save(case: str, folder: Path, layers: int = LAYERS, **changes: Any) -> nn.Module:
    """A model whose last layer of transformers is the MTP layer, with the tensors that it lacks."""
    family, sizes = CASES[case]
    sizes = {**sizes, "num_hidden_layers": layers + 1, **changes}
    model = save_tiny(family, sizes, folder)
    draw = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    own = {
        "eh_proj": torch.randn(SIZE, 2 * SIZE, generator=draw) / 8,
        "enorm": 1 + torch.randn(SIZE, generator=draw) / 8,
        "hnorm": 1 + torch.randn(SIZE, generator=draw) / 8,
        "shared_head.norm": 1 + torch.randn(SIZE, generator=draw) / 8,
        "shared_head.head": tensors["lm_head.weight"].clone(),
        "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
    }
    change(folder, {f"model.layers.{layers}.{name}.weight": each for name, each in own.items()})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Write, or with None remove, tensors of the checkpoint."""
    path = folder / "model.safetensors"
    merged = {
        name: each for name, each in {**load_file(path), **tensors}.items() if each is not None
    }
    save_file(merged, path)


class Reference:
    """The main model and its MTP layer as two stacks of transformers' decoder layers."""

    def __init__(self, model: nn.Module, folder: Path, layers: int = LAYERS) -> None:
        tensors = load_file(folder / "model.safetensors")
        prefix = f"model.layers.{layers}."
        self.own = {
            name.removeprefix(prefix).removesuffix(".weight"): each
            for name, each in tensors.items()
            if name.startswith(prefix)
        }
        self.embed = tensors["model.embed_tokens.weight"]
        self.trunk, self.layer = deepcopy(model.model), deepcopy(model.model)
        self.trunk.layers = self.trunk.layers[:layers]
        self.layer.layers = self.layer.layers[layers:]
        self.trunk.config.num_hidden_layers, self.layer.config.num_hidden_layers = layers, 1
        self.layer.norm.weight = nn.Parameter(self.own["shared_head.norm"])

    def logits(self, tokens: list[int], count: int) -> list[Tensor]:
        """Logits of `count` draft tokens after all `tokens`; each is the most likely one."""
        hidden = self.trunk(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
        following, found = tokens[1:], []
        for _ in range(count):
            normed = self._states(following, hidden)
            found.append(normed[-1] @ self.own["shared_head.head"].T)
            following = [*following, int(found[-1].argmax())]
            hidden = torch.cat((hidden, normed[-1:]))
        return found

    def _states(self, following: list[int], hidden: Tensor) -> Tensor:
        eps = self.layer.norm.variance_epsilon
        embedded = rms_norm(self.embed[following], (SIZE,), self.own["enorm"], eps)
        states = rms_norm(hidden, (SIZE,), self.own["hnorm"], eps)
        both = torch.cat((embedded, states), dim=-1) @ self.own["eh_proj"].T
        return self.layer(inputs_embeds=both[None], use_cache=False).last_hidden_state[0]


def make(folder: Path, **options: Any) -> Built:
    given = {"num_blocks": 200, "max_num_batched_tokens": 40, "dtype": "float32"}
    return build(folder, **{**given, **options})


def tokens_of(
    built: Built, params: SamplingParams, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    return generate(built.engine, prompts, params)


def recorded_logits(built: Built, monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> Any:
    """The tokens of a request that verifies no drafts, and the logits of all draft tokens."""
    calls: list[Tensor] = []
    logits = MTP.logits

    def recorded(self: MTP, normed: Tensor, network: Any) -> Tensor:
        calls.append(logits(self, normed, network))
        return calls[-1]

    monkeypatch.setattr(MTP, "logits", recorded)
    monkeypatch.setattr(governor.Governor, "choose", lambda _self, slots, *_: [0] * len(slots))
    (tokens,) = tokens_of(built, GREEDY, [prompt])
    return tokens, torch.cat(calls)


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("chunk", [40, 9])
@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_the_reference(
    case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(case, tmp_path)
    if chunk == 9:
        head = {f"model.layers.{LAYERS}.shared_head.head.weight": torch.randn(VOCAB, SIZE) / 8}
        change(tmp_path, head)
    reference, prompt = Reference(model, tmp_path), PROMPTS[0]
    built = make(tmp_path, spec="mtp", spec_tokens=2, max_num_batched_tokens=chunk)
    whose = "its own" if chunk == 9 else "the model's"
    assert built.report.choices[-1].value == f"mtp, up to 2 draft tokens, {whose} LM head"
    tokens, got = recorded_logits(built, monkeypatch, prompt)
    with torch.inference_mode():
        want = [
            each
            for count in range(1, 1 + len(tokens))
            for each in reference.logits([*prompt, *tokens[:count]], 2)
        ]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=1e-4)


ENGINES: dict[str, dict[str, Any]] = {
    "float32": {},
    "native kernels": {"dtype": "auto"},
    "plain kernels": {"plain_kernels": True},
    "preemption": {"num_blocks": 18},
    "int8 KV": {"dtype": "auto", "kv_cache_dtype": "int8"},
    "int8 weights": {"dtype": "auto", "quantization": "int8"},
}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_with_and_without_drafts(case: str, engine: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    off, on = (make(tmp_path, spec=spec, **ENGINES[engine]) for spec in ("none", "mtp"))
    for params in (GREEDY, SEEDED):
        want = tokens_of(off, params)
        assert tokens_of(on, params) == want
        assert tokens_of(on, params) == want, "with cached prefixes"
    stats = on.engine.stats()
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens < stats.num_draft_tokens / 2, "the layer is random"
    if engine == "preemption":
        assert stats.num_preemptions > 0


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("case", CASES)
def test_most_drafts_of_a_layer_that_agrees_are_accepted(case: str, tmp_path: Path) -> None:
    """The layer is a copy of the model's only one, and reads embeddings of unit size alone."""
    save(case, tmp_path, layers=1, first_k_dense_replace=0)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    copied = {
        name.replace("layers.0.", "layers.1."): each.clone()
        for name, each in tensors.items()
        if ".layers.0." in name
    }
    own = {
        "eh_proj": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)), dim=1),
        "enorm": torch.ones(SIZE),
        "shared_head.norm": tensors["model.norm.weight"].clone(),
    }
    copied |= {f"model.layers.1.{name}.weight": each for name, each in own.items()}
    change(tmp_path, {**copied, "model.embed_tokens.weight": rms_norm(table, (SIZE,))})
    off, on = make(tmp_path), make(tmp_path, spec="mtp", spec_tokens=3)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    assert tokens_of(on, params) == tokens_of(off, params)
    stats = on.engine.stats()
    assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens > 0


def test_auto_chooses_the_layer_where_the_files_have_one(tmp_path: Path) -> None:
    save("deepseek", tmp_path)

    def chosen(**options: Any) -> str:
        config = EngineConfig.of(model=str(tmp_path), device="cpu", **options)
        files = resolve(config.model)
        hparams = load_hparams(files, config.model)
        return resolve_method(config, files, hparams, "cpu").speculation.spec

    assert chosen(spec="auto") == "mtp"
    assert chosen(spec="auto", load_format="dummy") == "mtp"
    assert chosen(spec="auto", hf_overrides={"num_nextn_predict_layers": 0}) == "ngram"
    with pytest.raises(ConfigError, match=r"no MTP layer: .*has no num_nextn_predict_layers"):
        chosen(spec="mtp", hf_overrides={"num_nextn_predict_layers": 0})
    change(tmp_path, {f"model.layers.{LAYERS}.eh_proj.weight": None})
    assert chosen(spec="auto") == "ngram"
    with pytest.raises(ConfigError, match="lack the tensors of layer 2: the conversion left"):
        chosen(spec="mtp")
    with pytest.raises(ConfigError, match="--spec-model does nothing with --spec mtp"):
        chosen(spec="mtp", spec_model="x")


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("case", CASES)
def test_sleep_frees_and_restores_the_layer(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    off, on = (make(tmp_path, spec=spec, dtype="auto") for spec in ("none", "mtp"))
    want = tokens_of(off, GREEDY)
    assert tokens_of(on, GREEDY) == want
    assert_complete(on.engine)
    parts, plain = held(on).parts, held(off).parts
    assert all(parts[name].num_bytes > plain[name].num_bytes for name in ("weights", "KV cache"))
    accepted = on.engine.stats().num_accepted_tokens
    on.engine.sleep()
    on.engine.wake()
    assert tokens_of(on, GREEDY) == want
    assert on.engine.stats().num_accepted_tokens == 2 * accepted, "the drafts are the same"


@pytest.mark.usefixtures("verify_all")
def test_fp8_blocks_with_an_unquantised_projection(tmp_path: Path) -> None:
    """As DeepSeek V3 stores it: the config does not say that eh_proj and the head are not quantised."""
    save("deepseek", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in tensors.items():
        coded = name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
        if coded and "eh_proj" not in name:
            codes, scales = in_blocks(weight)
            change(tmp_path, {name: codes, f"{name}_scale_inv": scales})
    config = json.loads((tmp_path / "config.json").read_text())
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    off, on = make(tmp_path, dtype="auto"), make(tmp_path, dtype="auto", spec="mtp")
    assert tokens_of(on, GREEDY) == tokens_of(off, GREEDY)
    assert on.engine.stats().num_draft_tokens > 0


@pytest.mark.usefixtures("verify_all")
def test_a_gguf_file_gives_the_same_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's names of the layer, at the end of the blocks."""
    model = save("glm", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 1}))
    architecture, metadata = GGUF_CASES["glm-4.5-moe"]
    path = write_moe_gguf(tmp_path, architecture, {**metadata, "nextn_predict_layers": 1})
    names = [name for name in gguf.GGUFReader(path).tensors if ".nextn." in name.name]
    assert len(names) == 6
    built = make(path, spec="auto", spec_tokens=2)
    tokens, got = recorded_logits(built, monkeypatch, PROMPTS[1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        want = Reference(model, tmp_path).logits([*PROMPTS[1], *tokens], 2)
    torch.testing.assert_close(got[-2:], torch.stack(want), atol=1e-4, rtol=1e-4)
