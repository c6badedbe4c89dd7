"""Medusa and EAGLE heads: the same tokens with any head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runner.test_deterministic import CONFIG, PROMPT
from tests.speculative.test_speculation import prompts_for, verify_all
from windlass import LLM, SamplingParams
from windlass.core.speculation import governor
from windlass.errors import CheckpointError, ConfigError
from windlass.kernels.batch import Heads
from windlass.runner.drafter import DrafterInputs
from windlass.speculative.eagle import EagleDrafter
from windlass.speculative.medusa import MedusaDrafter, MedusaWeights
from windlass.tools.train_draft.eagle import EagleModule, EagleShape, UnrolledKV

__all__ = ["verify_all"]

VOCAB, DIM, WIDE = CONFIG["vocab_size"], 16, 224


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": DIM, "intermediate_size": WIDE}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    return path


def medusa(path: Path, draft_vocab: int | None = None, **config: Any) -> Path:
    path.mkdir()
    size = CONFIG["hidden_size"]
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    if draft_vocab is not None:
        tensors["d2t"] = torch.arange(draft_vocab) * 3
        config = {"draft_vocab_size": draft_vocab, **config}
    for i in range(3):
        tensors[f"{i}.0.linear.weight"] = torch.randn(size, size, generator=draw) / 30
        tensors[f"{i}.0.linear.bias"] = torch.zeros(size)
        tensors[f"{i}.1.weight"] = torch.randn(draft_vocab or VOCAB, size, generator=draw)
    save_file(tensors, path / "model.safetensors")
    described = {"medusa_num_heads": 3, "medusa_num_layers": 1, **config}
    (path / "config.json").write_text(json.dumps(described))
    return path


def eagle(path: Path, draft_vocab: int = 100, layer: str = "midlayer", **config: Any) -> Path:
    path.mkdir()
    size = CONFIG["hidden_size"]
    q, kv = CONFIG["num_attention_heads"] * DIM, CONFIG["num_key_value_heads"] * DIM
    shapes = {
        "fc.weight": (size, 3 * size),
        f"{layer}.hidden_norm.weight": (size,),
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * size),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * size),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * size),
        f"{layer}.self_attn.o_proj.weight": (size, q),
        f"{layer}.mlp.gate_proj.weight": (WIDE, size),
        f"{layer}.mlp.up_proj.weight": (WIDE, size),
        f"{layer}.mlp.down_proj.weight": (size, WIDE),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab, size),
    }
    draw = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}
    tensors["d2t"] = torch.arange(draft_vocab) * 3
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    save_file(tensors, path / "model.safetensors")
    described = {
        **{key: value for key, value in CONFIG.items() if key != "architectures"},
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "head_dim": DIM,
        "intermediate_size": WIDE,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        **config,
    }
    (path / "config.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("heads")
    return {"medusa": medusa(path / "medusa"), "eagle": eagle(path / "eagle")}


def make(model: Path, **options: Any) -> LLM:
    options = {"num_blocks": 200, "max_num_seqs": 16, "quantization": "int4", **options}
    return LLM(str(model), load_format="dummy", device="cpu", **options)


SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=24, seed=3, top_k=20, ignore_eos=True, logprobs=1),
    "penalties": SamplingParams(
        max_tokens=24, temperature=0.0, repetition_penalty=1.3, ignore_eos=True
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunked prompts": {"max_num_batched_tokens": 40},
    "preemption": {"num_blocks": 50, "block_size": 4, "max_model_len": 160},
    "plain kernels": {"plain_kernels": True},
}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_tokens_with_a_head(
    model: Path, heads: dict[str, Path], kind: str, engine: str
) -> None:
    options, prompts = ENGINES[engine], prompts_for(engine)
    off = make(model, **options)
    on = make(model, spec=kind, spec_model=str(heads[kind]), **options)
    for params in SAMPLING.values():
        want = [r.outputs[0].token_ids for r in off.generate(prompts, params)]
        assert [r.outputs[0].token_ids for r in on.generate(prompts, params)] == want
    stats = on.engine.stats()
    assert stats.num_draft_tokens > 100
    if engine == "preemption":
        assert stats.num_preemptions > 0


def test_both_naming_schemes_give_the_same_drafts(model: Path, tmp_path: Path) -> None:
    found = []
    for folder in (eagle(tmp_path / "a"), eagle(tmp_path / "b", layer="layers.0")):
        llm = make(model, spec="eagle", spec_model=str(folder), spec_tokens=2)
        made = llm.engine._scheduler._drafts._governor
        made.draft_length = lambda *_: 2
        made.choose = lambda slots, drafts, *_: (
            found.extend(draft.tokens for draft in drafts) or [0] * len(slots)
        )
        llm.generate([PROMPT], SAMPLING["greedy"])
    assert len(found) == 46
    assert found[:23] == found[23:]


@pytest.mark.parametrize(
    ("kind", "changes", "options", "message", "error"),
    [
        ("medusa", {"hidden_size": 999}, {}, "hidden_size 999", CheckpointError),
        ("medusa", {"vocab_size": 7}, {}, "vocab_size 7", CheckpointError),
        ("medusa", {"medusa_num_heads": 0}, {}, "no Medusa head", CheckpointError),
        ("medusa", {"medusa_num_heads": 5}, {}, "no tensor 3.0.linear.weight", CheckpointError),
        ("medusa", {"medusa_num_heads": "3"}, {}, "medusa_num_heads is '3'", CheckpointError),
        ("medusa", {"windlass": "x"}, {}, "windlass is 'x', expected an object", CheckpointError),
        ("medusa", {}, {"spec_tokens": 4}, "has 3 heads.* at most 3", ConfigError),
        ("medusa", {}, {"spec": "eagle"}, "Use --spec medusa", ConfigError),
        ("eagle", {}, {"spec": "medusa"}, "Use --spec eagle", ConfigError),
        ("eagle", {"draft_vocab_size": "x"}, {}, "draft_vocab_size is 'x'", CheckpointError),
        ("eagle", {"vocab_size": "x"}, {}, "vocab_size is 'x'", CheckpointError),
        ("eagle", {"eagle_config": 3}, {}, "eagle_config is 3, expected", CheckpointError),
        ("eagle", {"attention_bias": True}, {}, "--spec-model .* lacks 4 tensors", CheckpointError),
        ("medusa", {}, {"spec_alternatives": 2}, "2 needs captured CUDA graphs", ConfigError),
        ("eagle", {"draft_vocab_size": 50}, {}, "d2t has shape", CheckpointError),
        (
            "eagle",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}},
            {},
            "layers \\[0, 1, 99\\]",
            CheckpointError,
        ),
    ],
)
def test_unsuitable_heads_are_refused(
    model: Path,
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    message: str,
    error: type[Exception],
) -> None:
    folder = {"medusa": medusa, "eagle": eagle}[kind](tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(error, match=message):
        make(model, **{"spec": kind, "spec_model": str(folder), **options})


def test_unknown_tensors_are_refused(model: Path, tmp_path: Path) -> None:
    folder = medusa(tmp_path / "head", medusa_num_heads=2)  # the file has three
    options = {"spec": "medusa", "spec_model": str(folder)}
    make(model, **options)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "token_map": torch.arange(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 tensors belong to no Medusa head: token_map"):
        make(model, **options)


def test_an_eagle_head_with_an_invalid_d2t_is_refused(model: Path, tmp_path: Path) -> None:
    folder = eagle(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += VOCAB
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t maps to the tokens 500 to 896"):
        make(model, spec="eagle", spec_model=str(folder))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_is_checked_before_weights_are_read(
    model: Path, heads: dict[str, Path], tmp_path: Path, kind: str, monkeypatch
) -> None:
    monkeypatch.setattr("windlass.runner.load.load_network", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=r"--spec-model: model '.*nowhere' was not found"):
        make(model, spec=kind, spec_model=str(tmp_path / "nowhere"))
    cut = tmp_path / "cut"
    shutil.copytree(heads[kind], cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"--spec-model: .* is truncated"):
        make(model, spec=kind, spec_model=str(cut))


@pytest.mark.parametrize(
    ("stored", "named", "message"),
    [
        (None, 100, "no tensor d2t"),
        (None, 0, "draft_vocab_size is 0, and must be from 1 to the model's 500"),
        (100, 501, "draft_vocab_size is 501"),
        (100, 50, "d2t has shape \\[100\\]"),
        (100, None, "0.1.weight has shape \\[100, "),
        (200, 200, "d2t maps to the tokens 0 to 796, but the model has 0 to 499"),
    ],
)
def test_an_invalid_draft_vocabulary_is_refused(
    model: Path, tmp_path: Path, stored: int | None, named: int | None, message: str
) -> None:
    folder = medusa(tmp_path / "head", stored, draft_vocab_size=named)
    with pytest.raises(CheckpointError, match=message):
        make(model, spec="medusa", spec_model=str(folder))


def test_a_draft_vocabulary_needs_its_matrices(model: Path, tmp_path: Path) -> None:
    folder = medusa(tmp_path / "head", 100)
    tensors = load_file(folder / "model.safetensors")
    del tensors["1.1.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 1\.1\.weight"):
        make(model, spec="medusa", spec_model=str(folder))


def test_a_missing_head_is_reported() -> None:
    with pytest.raises(ConfigError, match="train-draft"):
        LLM("default", spec="eagle")
    with pytest.raises(ConfigError, match="does nothing with --spec ngram"):
        LLM("default", spec="ngram", spec_model="x")


def test_a_served_eagle_head_matches_the_trained_module(
    model: Path, heads: dict[str, Path], monkeypatch
) -> None:
    """Serving, step by step over a paged KV cache, against the module that training unrolls."""
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    draft = EagleDrafter.draft

    def recorded(self: EagleDrafter, inputs: DrafterInputs, count: int) -> torch.Tensor:
        aux_hidden_states = torch.cat(
            [inputs.aux_hidden_states[layer] for layer in self.layers], dim=-1
        )
        drafted = draft(self, inputs, count)
        calls.append((aux_hidden_states.clone(), inputs.following.clone(), drafted))
        return drafted

    monkeypatch.setattr(EagleDrafter, "draft", recorded)
    monkeypatch.setattr(governor.Governor, "choose", lambda _self, slots, *_: [0] * len(slots))
    monkeypatch.setattr(governor.Governor, "draft_length", lambda *_: 2)
    llm = make(model, quantization=None, spec="eagle", spec_model=str(heads["eagle"]))
    calls.clear()  # of the measurement at start
    llm.generate([PROMPT], SAMPLING["greedy"])
    served = torch.cat([drafted for *_, drafted in calls])

    weights = load_file(heads["eagle"] / "model.safetensors")
    attention = Heads(CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], DIM)
    shape = EagleShape(
        CONFIG["hidden_size"], WIDE, attention, CONFIG["rms_norm_eps"], VOCAB, len(weights["d2t"])
    )
    ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
    module = EagleModule(shape, ids)
    module.load_state_dict({**weights, "t2d": module.t2d})
    aux_hidden_states, following = (
        torch.cat(parts)[None] for parts in list(zip(*calls, strict=True))[:2]
    )
    table = llm.engine._runner._runner._parts.network.model.rotary[0].cos_sin
    embed = llm.engine._runner._runner._parts.network.embed
    kv, hidden, tokens, expected = (
        UnrolledKV(),
        module.from_target(aux_hidden_states),
        following,
        [],
    )
    with torch.no_grad():
        for ahead in range(2):
            turns = table[ahead : ahead + aux_hidden_states.shape[1]]
            hidden = module.step(hidden, embed(tokens[0])[None], turns, kv)
            tokens = ids[module.logits(hidden[0]).argmax(-1)].int()[None]
            expected.append(tokens[0, len(PROMPT) - 1 :])
    assert torch.equal(served, torch.stack(expected, dim=1))


@pytest.mark.parametrize("reduced", [False, True])
def test_medusa_siblings_are_the_next_likeliest_tokens(reduced: bool) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, 40, 16)
    blocks = [(torch.zeros(2, 16, 16), torch.zeros(2, 1, 16))]
    d2t = torch.arange(40) * 2 if reduced else None
    hidden, read = torch.randn(5, 16), torch.tensor([4, 0, 2])
    drafter = MedusaDrafter(
        MedusaWeights(blocks, matrices, d2t),
        None,  # type: ignore[arg-type]
        fused=False,
        num_siblings=2,
    )
    inputs = DrafterInputs(hidden, read, {}, read, read, None, None)  # type: ignore[arg-type]
    best = (hidden[read] @ matrices[0].T).topk(3).indices * (3 if reduced else 1)
    got = drafter.draft(inputs, 3, siblings=2)
    assert got[:, [0, 3, 4]].tolist() == best.tolist()
    assert torch.equal(got[:, :3], drafter.draft(inputs, 3))
