"""EAGLE-3 heads in torch, and their training; the state dict is the public layout.

A position reads the target's hidden states of a low, middle and high layer, or the head's own output
where the target has no states yet, and the embedding of the next token. It predicts the token after.
Training unrolls drafting: each draft token is made from the head's last output.

    root p, draft j: embedding of token p + 1 + j, rotated as position p + j, for token p + 2 + j
    it attends to  : positions 0 .. p from the target's states, and its own draft tokens 1 .. j
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.kernels.batch import Heads
from windlass.models.hparams import HParams
from windlass.models.rope import frequencies
from windlass.models.rope_config import RopeConfig
from windlass.tools.train_draft.batches import Batch
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.head import DECAY, StepMetrics, autocast, soft_loss, to_module_dtype
from windlass.tools.train_draft.target import States, Target

_STD = 0.02
_LABELS_PER_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of a head; all but the last are the target's."""

    hidden: int
    inner: int
    heads: Heads
    norm_eps: float
    vocab: int
    draft_vocab: int
    num_aux_layers: int = 3


@dataclass(slots=True)
class UnrolledKV:
    """Keys and values [texts, kv heads, positions, dim]: of the roots, then of draft token 1, ..."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Queries of one draft token over the keys of the roots and of the draft tokens."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        heads, wide = shape.heads, 2 * shape.hidden
        self._heads = heads
        self.q_proj = nn.Linear(wide, heads.num_q * heads.dim, bias=False)
        self.k_proj = nn.Linear(wide, heads.num_kv * heads.dim, bias=False)
        self.v_proj = nn.Linear(wide, heads.num_kv * heads.dim, bias=False)
        self.o_proj = nn.Linear(heads.num_q * heads.dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor, kv: UnrolledKV) -> Tensor:
        """x: [texts, positions, 2 * hidden]. Appends this draft token's keys and values."""
        q = rotate(self._split(self.q_proj(x)), cos_sin)
        kv.keys.append(rotate(self._split(self.k_proj(x)), cos_sin))
        kv.values.append(self._split(self.v_proj(x)))
        mixed = self._first(q, kv) if len(kv.keys) == 1 else self._later(q, kv)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._heads.dim)).transpose(1, 2)

    def _first(self, q: Tensor, kv: UnrolledKV) -> Tensor:
        (k,), (v,) = kv.keys, kv.values
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self._heads.group > 1
        )

    def _later(self, q: Tensor, kv: UnrolledKV) -> Tensor:
        """Attend to the roots up to the own root, then to each draft token of that root."""
        group, scale = self._heads.group, self._heads.dim**-0.5
        texts, _, count, dim = q.shape
        num_kv = self._heads.num_kv
        q = (q * scale).reshape(texts, num_kv, group * count, dim)
        roots = (q @ kv.keys[0].mT).view(texts, num_kv, group, count, count)
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        roots = roots.masked_fill(later, float("-inf"))
        q = q.view(texts, num_kv, group, count, dim)
        own = [(q * keys[:, :, None]).sum(-1, keepdim=True) for keys in kv.keys[1:]]
        weights = torch.cat([roots, *own], dim=-1).float().softmax(-1).to(q.dtype)
        mixed = weights[..., :count].reshape(texts, num_kv, -1, count) @ kv.values[0]
        mixed = mixed.view(texts, num_kv, group, count, dim)
        for i, values in enumerate(kv.values[1:]):
            mixed = mixed + weights[..., count + i, None] * values[:, :, None]
        return mixed.flatten(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The decoder layer, which reads an embedding and a hidden state, concatenated."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, embedded: Tensor, cos_sin: Tensor, kv: UnrolledKV) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, cos_sin, kv)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleModule(nn.Module):
    """All stored tensors; the embedding is the target's and not stored."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: EagleShape, draft_ids: Tensor) -> None:
        """`draft_ids`: the draft vocabulary, ascending [draft_vocab]."""
        super().__init__()
        self.fc = nn.Linear(shape.num_aux_layers * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        draft_ids = draft_ids.cpu()
        self.register_buffer("d2t", draft_ids - torch.arange(shape.draft_vocab))
        known = torch.zeros(shape.vocab, dtype=torch.bool)
        known[draft_ids] = True
        self.register_buffer("t2d", known)

    @property
    def draft_ids(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def from_target(self, aux_hidden_states: Tensor) -> Tensor:
        """A root's hidden state from the target's [..., aux layers * hidden]."""
        return self.fc(aux_hidden_states)

    def step(self, hidden: Tensor, embedded: Tensor, cos_sin: Tensor, kv: UnrolledKV) -> Tensor:
        """One draft token for every root: the hidden state of the next step, read by `logits`."""
        return self.midlayer(hidden, embedded, cos_sin, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of each head. x: [texts, heads, positions, dim]"""
    cos, sin = cos_sin.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return rotated.to(x.dtype)


def draft_vocabulary(texts: list[Text], size: int) -> Tensor:
    """The most frequent tokens of the answers, filled up with the lowest ids."""
    counts = Counter(token for text in texts for token in text.tokens[text.start :])
    chosen = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    chosen = chosen[:size]
    known = set(chosen)
    lowest = (token for token in range(size + len(known)) if token not in known)
    chosen += [next(lowest) for _ in range(size - len(chosen))]
    return torch.tensor(sorted(chosen))


class EagleHead:
    """Owns the module. The embedding is the target's, dense and frozen."""

    def __init__(self, target: Target, draft_ids: Tensor, num_draft_tokens: int, seed: int) -> None:
        hparams = target.hparams
        self.num_draft_tokens = num_draft_tokens
        self._target = target
        self._shape = EagleShape(
            hidden=hparams.hidden_size,
            inner=hparams.intermediate_size,
            heads=Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim),
            norm_eps=hparams.norm_eps,
            vocab=hparams.vocab_size,
            draft_vocab=len(draft_ids),
            num_aux_layers=len(target.layers),
        )
        self._embedding = target.embedding()
        self.module = EagleModule(self._shape, draft_ids)
        initialise(self.module, seed)
        self.module.to(target.device)
        self._draft_ids = self.module.draft_ids
        with torch.no_grad():
            # Initially the head passes the highest aux hidden state to the target's norm and LM
            # head: the wrong position, but the right space.
            self.module.fc.weight[:, -hparams.hidden_size :].diagonal().add_(1.0)
            self.module.lm_head.weight.copy_(target.head()[self._draft_ids])
            self.module.norm.weight.copy_(target.final_norm())
        inv_freq, scale = frequencies(hparams.rope, hparams.max_positions)
        angle = torch.outer(torch.arange(hparams.max_positions, dtype=torch.float32), inv_freq)
        table = torch.cat([angle.cos() * scale, angle.sin() * scale], dim=-1)
        self._cos_sin = table.to(target.device)

    def backward(self, batch: Batch, states: States) -> StepMetrics:
        labels, best = self._labels(batch, states)
        total = torch.zeros((), device=labels.device)
        accuracy = []
        with autocast(labels.device):
            for j, hidden in enumerate(self._unrolled(batch, states)):
                logits = self.module.logits(hidden.flatten(0, 1)[batch.roots(j)])
                weights = batch.weights(j)
                total = total + DECAY**j * soft_loss(logits, labels, weights)
                drafted = self._draft_ids[logits.detach().argmax(-1)]
                accuracy.append((drafted == best).float() @ weights)
        total.backward()
        return StepMetrics(total.detach(), torch.stack(accuracy))

    @torch.no_grad()
    def draft(self, batch: Batch, states: States) -> list[Tensor]:
        """Draft as a server does: from the head's own output and the previous draft token.

        The text's tokens stand for draft tokens: they are equal up to the first rejected draft
        token, and the tokens after it do not count.
        """
        found = []
        with autocast(self._cos_sin.device):
            for j, hidden in enumerate(self._unrolled(batch, states)):
                logits = self.module.logits(hidden.flatten(0, 1)[batch.roots(j)])
                found.append(self._draft_ids[logits.argmax(-1)])
        return found

    def _unrolled(self, batch: Batch, states: States) -> Iterator[Tensor]:
        """The head's outputs for draft token 0, 1, ... of every root [texts, positions, hidden]."""
        assert states.aux_hidden_states is not None
        kv = UnrolledKV()
        hidden = self.module.from_target(to_module_dtype(states.aux_hidden_states))
        count = batch.ids.shape[1]
        for j in range(self.num_draft_tokens):
            ids = F.pad(batch.ids[:, 1 + j :], (0, min(1 + j, count)))
            # Positions past the table's end belong to roots without labels.
            cos_sin = self._cos_sin[
                torch.arange(j, j + count, device=ids.device).clamp_max(len(self._cos_sin) - 1)
            ]
            hidden = self.module.step(hidden, self._embedding[ids], cos_sin, kv)
            yield hidden

    @torch.no_grad()
    def _labels(self, batch: Batch, states: States) -> tuple[Tensor, Tensor]:
        """The target's probabilities over the draft vocabulary [labels, draft], and its argmax."""
        rows = states.last.flatten(0, 1)[batch.labels]
        found, best = [], []
        for part in rows.split(_LABELS_PER_CHUNK):
            logits = self._target.logits(part).float()
            best.append(logits.argmax(-1))
            scale = logits.logsumexp(-1, keepdim=True)
            found.append((logits[:, self._draft_ids] - scale).exp())
        return torch.cat(found), torch.cat(best)

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
    """Initialise the matrices with small random numbers from their own generator; norms are one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, _STD, generator=generator)


def rope_config(rope: RopeConfig) -> dict[str, Any]:
    """The rotary config in config.json's older format, which most programs read."""
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
