"""The EAGLE-3 head as plain torch; its state dict is the public layout.

A position takes the target's hidden states of low, middle and high layers, or the head's own output
where the target has not been yet, and the embedding of the next token, and guesses the one after.

    root p, guess j: embedding of token p + 1 + j, rotated as position p + j, for token p + 2 + j
    it sees        : positions 0 .. p through the target's eyes, and its own guesses 1 .. j
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from windlass.kernels.batch import Heads


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
class Memory:
    """Keys and values so far [texts, kv heads, positions, dim]; first the roots', then of guess 1."""

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
    """Queries of one guess over the roots' keys and the guesses' own."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        heads, wide = shape.heads, 2 * shape.hidden
        self._heads = heads
        self.q_proj = nn.Linear(wide, heads.num_q * heads.dim, bias=False)
        self.k_proj = nn.Linear(wide, heads.num_kv * heads.dim, bias=False)
        self.v_proj = nn.Linear(wide, heads.num_kv * heads.dim, bias=False)
        self.o_proj = nn.Linear(heads.num_q * heads.dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos_sin: Tensor, memory: Memory) -> Tensor:
        """x: [texts, positions, 2 * hidden]. Adds this guess's keys and values to the memory."""
        q = rotate(self._split(self.q_proj(x)), cos_sin)
        memory.keys.append(rotate(self._split(self.k_proj(x)), cos_sin))
        memory.values.append(self._split(self.v_proj(x)))
        mixed = self._first(q, memory) if len(memory.keys) == 1 else self._later(q, memory)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._heads.dim)).transpose(1, 2)

    def _first(self, q: Tensor, memory: Memory) -> Tensor:
        (k,), (v,) = memory.keys, memory.values
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self._heads.group > 1
        )

    def _later(self, q: Tensor, memory: Memory) -> Tensor:
        """Roots' keys up to the own root, then one key of each guess made from that root."""
        group, scale = self._heads.group, self._heads.dim**-0.5
        texts, _, count, dim = q.shape
        kv = self._heads.num_kv
        q = (q * scale).reshape(texts, kv, group * count, dim)
        roots = (q @ memory.keys[0].mT).view(texts, kv, group, count, count)
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        roots = roots.masked_fill(later, float("-inf"))
        q = q.view(texts, kv, group, count, dim)
        own = [(q * keys[:, :, None]).sum(-1, keepdim=True) for keys in memory.keys[1:]]
        weights = torch.cat([roots, *own], dim=-1).float().softmax(-1).to(q.dtype)
        mixed = weights[..., :count].reshape(texts, kv, -1, count) @ memory.values[0]
        mixed = mixed.view(texts, kv, group, count, dim)
        for i, values in enumerate(memory.values[1:]):
            mixed = mixed + weights[..., count + i, None] * values[:, :, None]
        return mixed.flatten(1, 2)


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer, which reads an embedding and a hidden state side by side."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.hidden_norm = Norm(shape.hidden, shape.norm_eps)
        self.input_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, embedded: Tensor, cos_sin: Tensor, memory: Memory) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(both, cos_sin, memory)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleModule(nn.Module):
    """Everything that is stored: the embedding is the target's and is not."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: EagleShape, draft_ids: Tensor) -> None:
        """`draft_ids`: the tokens that can be guessed, ascending [draft_vocab]."""
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
        """A root's hidden state out of the target's [..., taps * hidden]."""
        return self.fc(aux_hidden_states)

    def step(self, hidden: Tensor, embedded: Tensor, cos_sin: Tensor, memory: Memory) -> Tensor:
        """One guess for every root: the next guess's hidden state, and what `logits` reads."""
        return self.midlayer(hidden, embedded, cos_sin, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        return self.lm_head(self.norm(hidden))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + half) of each head. x: [texts, heads, positions, dim]"""
    cos, sin = cos_sin.chunk(2, dim=-1)
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return turned.to(x.dtype)
