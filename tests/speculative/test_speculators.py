"""EAGLE-3 heads in the layout of the speculators library: the same drafts, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.runner.test_deterministic import CONFIG, PROMPT
from tests.speculative.test_heads import DIM, SAMPLING, VOCAB, WIDE, eagle, make, model
from windlass.config import EngineConfig
from windlass.core.speculation import governor
from windlass.core.speculation.costs import Costs, StepCosts
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.kernels.batch import Heads
from windlass.measurement_cache import MeasurementCache
from windlass.models.eagle import EagleNorms
from windlass.runner.drafter import DrafterInputs
from windlass.speculative import setup
from windlass.speculative.auto import resolve_auto
from windlass.speculative.eagle import EagleDrafter
from windlass.speculative.speculators import NORMS
from windlass.tools.train_draft.eagle import EagleModule, EagleShape, Norm, UnrolledKV

__all__ = ["model"]

SIZE = CONFIG["hidden_size"]
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"


def speculators(path: Path, like: Path, layer: Any = None, **changes: Any) -> Path:
    """Write the head of the folder `like` as the library would save it."""
    path.mkdir()
    own = json.loads((like / "config.json").read_text())
    aux_layers, vocab = own.pop("eagle_config")[AUX_LAYERS], own.pop("draft_vocab_size")
    nested = {key: value for key, value in own.items() if key != "architectures"}
    theta = {"rope_theta": nested.pop("rope_theta", 10000.0), "rope_type": "default"}
    described = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": vocab,
        "norm_before_residual": False,
        "target_hidden_size": None,
        AUX_LAYERS: aux_layers,
        LAYER: {**nested, "model_type": "llama", "rope_parameters": theta, **(layer or {})},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/verifier"},
        },
        **changes,
    }
    (path / "config.json").write_text(json.dumps(described))
    tensors = load_file(like / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    tensors["embed_tokens.weight"] = torch.ones(VOCAB, SIZE)
    draw = torch.Generator().manual_seed(5)
    if described.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.randn(3 * SIZE, generator=draw)
    for aux in range(3 if described.get("fc_norm") else 0):
        tensors[f"fc_norm.{aux}.weight"] = torch.randn(SIZE, generator=draw)
    save_file(tensors, path / "model.safetensors")
    return path


class Reference(EagleModule):
    """The reference head, with every optional norm."""

    def __init__(self, shape: EagleShape, ids: Tensor, norms: dict[str, bool]) -> None:
        super().__init__(shape, ids)
        self._norms = norms
        if norms["norm_before_fc"]:
            self.input_norm = Norm(3 * shape.hidden, shape.norm_eps)
        if norms["fc_norm"]:
            self.fc_norm = nn.ModuleList(Norm(shape.hidden, shape.norm_eps) for _ in range(3))

    def from_target(self, aux_hidden_states: Tensor) -> Tensor:
        if self._norms["norm_before_fc"]:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self._norms["fc_norm"]:
            each = zip(self.fc_norm, aux_hidden_states.chunk(3, dim=-1), strict=True)
            aux_hidden_states = torch.cat([norm(aux) for norm, aux in each], dim=-1)
        return self.fc(aux_hidden_states)

    def step(self, hidden: Tensor, embedded: Tensor, cos_sin: Tensor, kv: UnrolledKV) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        base = normed if self._norms["norm_before_residual"] else hidden
        hidden = base + layer.self_attn(both, cos_sin, kv)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.norm(hidden) if self._norms["norm_output"] else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden) if self._norms["norm_output"] else super().logits(hidden)


class Recorded:
    """Three draft tokens after every token, none of them verified, and the drafter's inputs."""

    def __init__(self, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        draft = EagleDrafter.draft

        def recorded(self: EagleDrafter, inputs: DrafterInputs, count: int) -> Tensor:
            aux_hidden_states = torch.cat(
                [inputs.aux_hidden_states[layer] for layer in self.layers], dim=-1
            )
            aux_hidden_states, following = aux_hidden_states.clone(), inputs.following.clone()
            drafted = draft(self, inputs, count)
            calls.append((aux_hidden_states, following, drafted))
            return drafted

        with monkeypatch.context() as patch:
            patch.setattr(EagleDrafter, "draft", recorded)
            patch.setattr(governor.Governor, "choose", lambda _self, slots, *_: [0] * len(slots))
            patch.setattr(governor.Governor, "draft_length", lambda *_: 3)
            some = StepCosts({1: 1.0, 2: 1.0})
            patch.setattr(setup, "measure", lambda *_: Costs(some, some))
            patch.setattr(setup, "open_measurement_cache", lambda *_, **__: MeasurementCache())
            self.llm = make(model, quantization=None, spec="eagle", spec_model=str(folder))
            self.llm.generate([PROMPT], SAMPLING["greedy"])
        self.aux_hidden_states, self.following = (
            torch.cat([call[i] for call in calls])[None] for i in (0, 1)
        )
        self.drafted = torch.cat([drafted for *_, drafted in calls])


def reference_drafts(recorded: Recorded, folder: Path, norms: dict[str, bool]) -> Tensor:
    """The reference head's drafts from the same aux hidden states and tokens."""
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("layers.0.", "midlayer."): one for name, one in weights.items()}
    del weights["embed_tokens.weight"]
    attention = Heads(CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], DIM)
    count = len(weights["d2t"])
    shape = EagleShape(SIZE, WIDE, attention, CONFIG["rms_norm_eps"], VOCAB, count)
    ids = weights["d2t"] + torch.arange(count)
    module = Reference(shape, ids, norms)
    module.load_state_dict({**weights, "t2d": module.t2d})
    network = recorded.llm.engine._runner._runner._parts.network
    table = network.model.rotary[0].cos_sin
    kv, tokens, drafted = UnrolledKV(), recorded.following, []
    with torch.no_grad():
        hidden = module.from_target(recorded.aux_hidden_states)
        for ahead in range(3):
            turns = table[ahead : ahead + recorded.aux_hidden_states.shape[1]]
            hidden = module.step(hidden, network.embed(tokens[0])[None], turns, kv)
            tokens = ids[module.logits(hidden[0]).argmax(-1)].int()[None]
            drafted.append(tokens[0, len(PROMPT) - 1 :])
    return torch.stack(drafted, dim=1)


def test_norms_match_the_fields_of_eagle_norms() -> None:
    assert EagleNorms.__slots__ == NORMS


def test_both_layouts_give_the_same_drafts(model: Path, tmp_path: Path, monkeypatch):
    own = eagle(tmp_path / "own")
    other = speculators(tmp_path / "other", own)
    found = [Recorded(model, folder, monkeypatch).drafted for folder in (own, other)]
    assert found[0].shape == (24, 3)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "true", [(), *((name,) for name in NORMS), ("norm_before_residual", "fc_norm", "norm_output")]
)
def test_optional_norms_match_the_reference(
    model: Path, tmp_path: Path, true: tuple[str, ...], monkeypatch
) -> None:
    norms = {name: name in true for name in NORMS}
    folder = speculators(tmp_path / "head", eagle(tmp_path / "own"), **norms)
    recorded = Recorded(model, folder, monkeypatch)
    assert torch.equal(recorded.drafted, reference_drafts(recorded, folder, norms))


def test_a_norm_changes_the_drafts(model: Path, tmp_path: Path, monkeypatch) -> None:
    """Otherwise the test above would prove nothing."""
    own = eagle(tmp_path / "own")
    folders = [speculators(tmp_path / name, own, **{name: True}) for name in NORMS]
    plain, *found = (Recorded(model, each, monkeypatch).drafted for each in (own, *folders))
    assert not any(torch.equal(plain, each) for each in found)


def test_a_head_of_the_full_vocabulary_needs_no_d2t(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    own = eagle(tmp_path / "own", draft_vocab=VOCAB)
    tensors = load_file(own / "model.safetensors")
    save_file({**tensors, "d2t": torch.zeros(VOCAB, dtype=torch.int64)}, own / "model.safetensors")
    other = speculators(tmp_path / "other", own)
    tensors = load_file(other / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    save_file(tensors, other / "model.safetensors")
    assert torch.equal(*(Recorded(model, each, monkeypatch).drafted for each in (own, other)))


def test_a_draft_vocabulary_needs_d2t(model: Path, tmp_path: Path) -> None:
    folder = speculators(tmp_path / "head", eagle(tmp_path / "own"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*d2t"):
        make(model, spec="eagle", spec_model=str(folder))


def test_auto_detects_the_speculators_layout(tmp_path: Path) -> None:
    folder = speculators(tmp_path / "head", eagle(tmp_path / "own"), architectures=["Other"])
    config = EngineConfig.of(model="x", spec="auto", spec_model=str(folder))
    assert resolve_auto(config).speculation.spec == "eagle"


@pytest.mark.parametrize(
    ("layer", "changes", "message", "error"),
    [
        ({}, {"speculators_model_type": "dflash"}, "'dflash'.*only 'eagle3'", UnsupportedError),
        ({}, {"speculators_model_type": None}, "None; only 'eagle3'", UnsupportedError),
        ({}, {"embed_requires_grad": True}, "embed_requires_grad is true", UnsupportedError),
        ({}, {"target_hidden_size": 8}, "target_hidden_size is 8, but", UnsupportedError),
        ({}, {"norm_before_residual": None}, "Write true or false", CheckpointError),
        ({}, {"norm_output": 3}, "norm_output is 3, expected true or", CheckpointError),
        ({}, {"quantization_config": {"a": 1}}, "has a quantization_config", UnsupportedError),
        ({}, {LAYER: 3}, "transformer_layer_config is 3, expected", CheckpointError),
        ({}, {LAYER: {}}, "'num_attention_heads' is missing", CheckpointError),
        ({}, {AUX_LAYERS: [0, 1]}, r"lists aux layers \[0, 1\]", CheckpointError),
        (
            {},
            {"norm_before_fc": True, "fc_norm": True},
            "norm_before_fc and fc_norm are both",
            CheckpointError,
        ),
        ({"model_type": "qwen3"}, {}, "model_type is 'qwen3'", UnsupportedError),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2", UnsupportedError),
        ({"layer_types": ["sliding_attention"]}, {}, "only full_attention", UnsupportedError),
        ({"mlp_bias": True}, {}, "mlp_bias is true", UnsupportedError),
        ({"hidden_size": 8}, {}, "for org/verifier with hidden_size 8", CheckpointError),
        ({"vocab_size": 8}, {}, "for org/verifier with vocab_size 8", CheckpointError),
    ],
)
def test_unsupported_options_are_refused_by_name(
    model: Path,
    tmp_path: Path,
    layer: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    error: type[Exception],
) -> None:
    folder = speculators(tmp_path / "head", eagle(tmp_path / "own"), layer, **changes)
    with pytest.raises(error, match=message):
        make(model, spec="eagle", spec_model=str(folder))


def test_a_head_is_refused_as_a_draft_model(model: Path, tmp_path: Path) -> None:
    folder = speculators(tmp_path / "head", eagle(tmp_path / "own"))
    with pytest.raises(ConfigError, match=r"is a head, not a model\. Use --spec eagle"):
        make(model, spec="draft", spec_model=str(folder))
