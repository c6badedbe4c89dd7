"""Trains an EAGLE head: guesses are unrolled, each made from the head's own output before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from windlass.kernels.batch import Heads
from windlass.models.hparams import HParams
from windlass.models.rope import frequencies
from windlass.models.rope_config import RopeConfig
from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.eagle_module import EagleModule, EagleShape, Memory
from windlass.tools.train_draft.head import DECAY, Figures, arithmetic, as_inputs, soft_loss, stored
from windlass.tools.train_draft.target import States, Target
from windlass.tools.train_draft.writing import Text

_STD = 0.02
_LABELS_AT_ONCE = 4096


def draft_vocabulary(texts: list[Text], size: int) -> Tensor:
    """The tokens that answers have most often, and the lowest ids where these are too few."""
    counts = Counter(token for text in texts for token in text.tokens[text.start :])
    chosen = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    chosen = chosen[:size]
    known = set(chosen)
    lowest = (token for token in range(size + len(known)) if token not in known)
    chosen += [next(lowest) for _ in range(size - len(chosen))]
    return torch.tensor(sorted(chosen))


class EagleHead:
    """Owns the module; the embedding is the target's, dense and frozen."""

    def __init__(self, target: Target, draft_ids: Tensor, num_draft_tokens: int, seed: int) -> None:
        hparams = target.hparams
        self.num_draft_tokens = num_draft_tokens
        self._target = target
        self._shape = EagleShape(
            hparams.hidden_size,
            hparams.intermediate_size,
            Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim),
            hparams.norm_eps,
            hparams.vocab_size,
            len(draft_ids),
            len(target.layers),
        )
        self._embedding = target.embedding()
        self.module = EagleModule(self._shape, draft_ids)
        initialise(self.module, seed)
        self.module.to(target.device)
        self._draft_ids = self.module.draft_ids
        with torch.no_grad():
            # It starts by handing the highest tap to the target's own norm and head: that guesses
            # the wrong place, but in the right space.
            self.module.fc.weight[:, -hparams.hidden_size :].diagonal().add_(1.0)
            self.module.lm_head.weight.copy_(target.head()[self._draft_ids])
            self.module.norm.weight.copy_(target.final_norm())
        inv_freq, scale = frequencies(hparams.rope)
        angle = torch.outer(torch.arange(hparams.max_positions, dtype=torch.float32), inv_freq)
        table = torch.cat([angle.cos() * scale, angle.sin() * scale], dim=-1)
        self._cos_sin = table.to(target.device)

    def learn(self, batch: Batch, states: States) -> Figures:
        labels, best = self._labels(batch, states)
        total = torch.zeros((), device=labels.device)
        right = []
        with arithmetic(labels.device):
            for j, hidden in enumerate(self._unrolled(batch, states)):
                logits = self.module.logits(hidden.flatten(0, 1)[batch.roots(j)])
                weights = batch.weights(j)
                total = total + DECAY**j * soft_loss(logits, labels, weights)
                guessed = self._draft_ids[logits.detach().argmax(-1)]
                right.append((guessed == best).float() @ weights)
        total.backward()
        return Figures(total.detach(), torch.stack(right))

    @torch.no_grad()
    def guess(self, batch: Batch, states: States) -> list[Tensor]:
        """As a server drafts: a guess's inputs are its own output and the guess before it.

        Tokens of the text stand for guesses: as far as those were right they are the same, and
        what follows a wrong one does not count.
        """
        found = []
        with arithmetic(self._cos_sin.device):
            for j, hidden in enumerate(self._unrolled(batch, states)):
                logits = self.module.logits(hidden.flatten(0, 1)[batch.roots(j)])
                found.append(self._draft_ids[logits.argmax(-1)])
        return found

    def _unrolled(self, batch: Batch, states: States) -> Iterator[Tensor]:
        """The head's outputs for guess 0, 1, ... of every position [texts, positions, hidden]."""
        assert states.aux_hidden_states is not None
        memory = Memory()
        hidden = self.module.from_target(as_inputs(states.aux_hidden_states))
        count = batch.ids.shape[1]
        for j in range(self.num_draft_tokens):
            ids = F.pad(batch.ids[:, 1 + j :], (0, min(1 + j, count)))
            # Positions past the table's end belong to roots that nothing is asked of.
            cos_sin = self._cos_sin[
                torch.arange(j, j + count, device=ids.device).clamp_max(len(self._cos_sin) - 1)
            ]
            hidden = self.module.step(hidden, self._embedding[ids], cos_sin, memory)
            yield hidden

    @torch.no_grad()
    def _labels(self, batch: Batch, states: States) -> tuple[Tensor, Tensor]:
        """The target's probabilities of draft tokens [labels, draft], and its choice of all."""
        rows = states.last.flatten(0, 1)[batch.labels]
        found, best = [], []
        for part in rows.split(_LABELS_AT_ONCE):
            logits = self._target.logits(part).float()
            best.append(logits.argmax(-1))
            scale = logits.logsumexp(-1, keepdim=True)
            found.append((logits[:, self._draft_ids] - scale).exp())
        return torch.cat(found), torch.cat(best)

    def tensors(self) -> dict[str, Tensor]:
        return stored(self.module)

    def config(self) -> dict[str, Any]:
        hparams = self._target.hparams
        layers = list(self._target.layers)
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": hparams.hidden_size,
            "intermediate_size": hparams.intermediate_size,
            "num_attention_heads": hparams.num_heads,
            "num_key_value_heads": hparams.num_kv_heads,
            "head_dim": hparams.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": hparams.vocab_size,
            "draft_vocab_size": self._shape.draft_vocab,
            "rms_norm_eps": hparams.norm_eps,
            "max_position_embeddings": hparams.max_positions,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **_ids(hparams),
            **rope_config(hparams.rope),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": layers,
                "use_aux_hidden_state": True,
            },
        }


def initialise(module: EagleModule, seed: int) -> None:
    """Small random matrices from a generator of their own; norms start at one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _STD, generator=generator)


def rope_config(rope: RopeConfig) -> dict[str, Any]:
    """Rotary positions in config.json's older spelling, which most programs read."""
    if rope.kind == "default" and rope.rope_factors is None:
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    for name in ("low_freq_factor", "high_freq_factor", "attention_factor", "rope_factors"):
        value = getattr(rope, name)
        if value is not None:
            scaling[name] = list(value) if name == "rope_factors" else value
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
        values = {name: getattr(rope, name) for name in names}
        scaling |= {name: value for name, value in values.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _ids(hparams: HParams) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if hparams.bos_id is not None:
        found["bos_token_id"] = hparams.bos_id
    if hparams.eos_ids:
        found["eos_token_id"] = list(hparams.eos_ids)
    return found
