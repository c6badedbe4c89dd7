"""Every option of attention and RoPE in the reference, against its definition in plain torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.test_attention import make_batch
from windlass.kernels import batch_invariant_attention, reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import Heads
from windlass.kernels.select import Need, select

ROWS = [(5, 1), (0, 9), (40, 1), (31, 7)]
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", [reference, batch_invariant_attention])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (6, False), (6, True)])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_options(kernel, window, chunked, soft_cap, sinks) -> None:
    kv, batch = make_batch(ROWS, 2, 16, size=4)
    queries = normal(len(batch.positions), 6, 16)
    logits = normal(6, seed=1) if sinks else None
    options = AttentionOptions(0.3, window, soft_cap, logits, chunked)
    got = kernel.attention(queries, kv, batch, options)
    for span in batch.spans:
        keys, values = reference.read_row(
            kv, batch.tables[0, batch.token_slots[span.first]], span.context
        )
        for i in range(span.count):
            position = span.start + i
            first = 0 if window is None else max(0, position + 1 - window)
            first = position // 6 * 6 if chunked else first
            for head in range(6):
                scores = [
                    0.3 * float(queries[span.first + i, head] @ key)
                    for key in keys[head // 3, first : position + 1]
                ]
                if soft_cap is not None:
                    scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
                weights = [math.exp(score) for score in scores]
                total = sum(weights)
                if options.sinks is not None:
                    total += math.exp(options.sinks[head])
                want = torch.tensor(weights) @ values[head // 3, first : position + 1] / total
                torch.testing.assert_close(got[span.first + i, head], want, atol=1e-5, rtol=1e-4)


def test_interleaved_pairs_are_neighbours() -> None:
    """A pair is a complex number, times the complex number of its angle."""
    x, angle = normal(5, 3, 12), normal(5, 4, seed=1)
    got = reference.rope(x, angle.cos(), angle.sin(), interleaved=True)
    turned = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(got[..., :8], torch.view_as_real(turned).flatten(-2))
    assert torch.equal(got[..., 8:], x[..., 8:])


@pytest.mark.parametrize("per_head", [False, True])
def test_norms_of_heads(per_head: bool) -> None:
    heads = Heads(4, 2, 16)
    kv, batch = make_batch(ROWS, 2, 16, size=4)
    qkv = normal(len(batch.positions), 8 * 16)
    q = qkv.view(-1, 8, 16)[:, :4]
    shapes = ((4, 16), (2, 16)) if per_head else ((16,), (16,))
    weights = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    norms = QKNorms(*weights, eps=1e-5, kind="layer")
    got = reference.rope_write(qkv, heads, RopeOptions(None, norms=norms), kv, batch)
    want = torch.nn.functional.layer_norm(q, (16,), eps=1e-5) * weights[0]
    torch.testing.assert_close(got, want)
    got = reference.rope_write(
        qkv, heads, RopeOptions(None, norms=replace(norms, kind="rms")), kv, batch
    )
    want = torch.nn.functional.rms_norm(q, (16,), eps=1e-5) * weights[0]
    torch.testing.assert_close(got, want)


def test_without_a_table_nothing_is_rotated() -> None:
    kv, batch = make_batch(ROWS, 2, 16, size=4)
    qkv = normal(len(batch.positions), 8 * 16)
    got = reference.rope_write(qkv, Heads(4, 2, 16), RopeOptions(None), kv, batch)
    assert torch.equal(got.flatten(1), qkv[:, :64])
    span = batch.spans[-1]
    keys, values = reference.read_row(kv, batch.tables[0, 3], span.context, span.start)
    new = qkv[span.first :].view(-1, 8, 16).transpose(0, 1)
    assert torch.equal(keys, new[4:6])
    assert torch.equal(values, new[6:])


def test_kernels_refuse_what_they_lack() -> None:
    need = Need(CPU, torch.float32, Heads(4, 2, 12), sinks=True)
    assert "sinks" in select("attention", need).refusals["torch"]
    assert select("attention", need).name == "plain"
    need = Need(torch.device("cuda"), torch.bfloat16, Heads(34, 2, 64))
    assert "17 query heads share a kv head" in select("attention", need).refusals["triton"]
