"""The EAGLE-3 head in torch; its state dict is the public layout.

A position reads the target's hidden states of a low, middle and high layer, or the head's own output
where the target has no states yet, and the embedding of the next token. It predicts the token after.

    root p, draft j: embedding of token p + 1 + j, rotated as position p + j, for token p + 2 + j
    it attends to  : positions 0 .. p from the target's states, and its own draft tokens 1 .. j
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
    """The gated MLP."""

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
