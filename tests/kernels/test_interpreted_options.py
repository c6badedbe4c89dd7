"""Options of attention and RoPE in Triton's interpreter, against the reference.

The cases run in a separate process, like those of test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_attention import hide_behind_window
from tests.kernels.test_interpreted import INTERPRETED, inside, make_batch
from tests.kernels.test_interpreted_codes import assert_same_pages, copy_of, quantised_batch
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, QKNorms, RopeOptions
from windlass.kernels.batch import AttentionWork, Heads, LayerKV, Span, StepBatch

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Options of a layer, as (kind, per_head) of its norms, and of its attention."""

    dim: int = 24
    rotated: int = 24
    interleaved: bool = False
    norm: tuple[str, bool] | None = None
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    chunked: bool = False

    @property
    def heads(self) -> Heads:
        return Heads(6, 2, self.dim)

    @property
    def rope(self) -> RopeOptions:
        angle = torch.rand(640, self.rotated // 2) * 6
        table = torch.cat([angle.cos(), angle.sin()], -1) if self.rotated else None
        norms = None
        if self.norm is not None:
            kind, per_head = self.norm
            shapes = [(num, self.dim) if per_head else (self.dim,) for num in (6, 2)]
            norms = QKNorms(*(torch.randn(shape) for shape in shapes), eps=1e-5, kind=kind)
        return RopeOptions(table, self.interleaved, norms)

    @property
    def attention(self) -> AttentionOptions:
        sinks = torch.randn(6) * 3 if self.sinks else None
        return AttentionOptions(0.2, self.window, self.cap, sinks, self.chunked)

    def qkv(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, 10 * self.dim) + 0.3


CASES = {
    "gpt-oss": Case(dim=64, rotated=64, sinks=True, window=20),
    "gemma": Case(norm=("rms", False), cap=3.0, window=30),
    "command-r": Case(interleaved=True, norm=("layer", True)),
    "glm": Case(rotated=12, interleaved=True),
    "llama 4": Case(interleaved=True, norm=("rms", False), window=30, chunked=True),
    "phi": Case(dim=80, rotated=32),
    "stablelm": Case(rotated=6, norm=("layer", True)),
    "without rotation": Case(dim=40, rotated=0, norm=("rms", True)),
    "all": Case(48, 24, True, ("layer", False), 33, 2.0, True),
}
named = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@inside
@named
@pytest.mark.parametrize("rows", [[(200, 1), (0, 1)], [(40, 5), (60, 1)]], ids=["decode", "mixed"])
def test_attend(case: Case, rows: list[tuple[int, int]]) -> None:
    from windlass.kernels.triton.attention import attend

    kv, batch = make_batch(case.heads, rows)
    qkv, rope, options = case.qkv(len(batch.positions)), case.rope, case.attention
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    queries = reference.rope_write(qkv, case.heads, rope, kv, batch)
    want = reference.attention(queries, kv, batch, options)
    if case.window is not None:
        ours, hidden = hide_behind_window(ours, batch, options)
        batch = replace(hidden, work=batch.work)
    got = attend(qkv, case.heads, rope, ours, batch, options)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
    for span in batch.spans:
        table = batch.tables[0, batch.token_slots[span.first]]
        written = reference.read_row(ours, table, span.context, span.start)
        expected = reference.read_row(kv, table, span.context, span.start)
        for got, want in zip(written, expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@inside
@pytest.mark.parametrize("name", ["gpt-oss", "all"])
def test_codes(name: str) -> None:
    from windlass.kernels.triton.attention import attend

    case = CASES[name]
    kv, batch = quantised_batch(case.heads, [(150, 1), (40, 5)])
    batch = replace(batch, batch_invariant=True)  # every key is read from its page
    qkv, rope, options = case.qkv(6), case.rope, case.attention
    ours = copy_of(kv)
    queries = reference.rope_write(qkv, case.heads, rope, kv, batch)
    want = reference.attention(queries, kv, batch, options)
    got = attend(qkv, case.heads, rope, ours, batch, options)
    assert (got - want).abs().max() < 6e-3 * want.abs().max()
    assert_same_pages(ours, kv)


@inside
def test_a_chunk_with_sinks_attends_to_its_own_keys_before_quantisation() -> None:
    from windlass.kernels.triton.attention import attend

    case = CASES["gpt-oss"]
    kv, batch = quantised_batch(case.heads, [(40, 9)])
    qkv, rope, options = case.qkv(9), case.rope, case.attention
    exact = LayerKV(
        kv.keys.float() * kv.key_scales[..., None], kv.values.float() * kv.value_scales[..., None]
    )
    queries = reference.rope_write(qkv, case.heads, rope, exact, batch)
    want = reference.attention(queries, exact, batch, options)
    got = attend(qkv, case.heads, rope, kv, batch, options)
    assert (got - want).abs().max() < 4e-3 * want.abs().max()


@inside
@pytest.mark.parametrize("name", ["command-r", "all"])
def test_siblings_have_the_options_too(name: str) -> None:
    """A row of three adjacent tokens, the last of which is an alternative to the second."""
    from windlass.kernels.triton.attention import attend

    case, start = CASES[name], 140
    kv, rows_batch = make_batch(case.heads, [(start, 2), (0, 1)])
    positions, slots = torch.tensor([start, start + 1, start + 1]).int(), torch.zeros(3).int()
    work = AttentionWork(
        singles=torch.arange(3, dtype=torch.int32),
        tiles=torch.empty((0, 5), dtype=torch.int32),
        splits=4,
        counters=torch.zeros(3 * 2, dtype=torch.int32),
        width=3,
        siblings=1,
        spare=int(rows_batch.tables[0, 1, 0]),
    )
    batch = StepBatch(positions, slots, rows_batch.tables, [], [kv], work=work)
    qkv, rope, options = case.qkv(3), case.rope, case.attention
    ours = LayerKV(kv.keys.clone(), kv.values.clone())
    got = attend(qkv, case.heads, rope, ours, batch, options)
    for tokens in ([0, 1], [0, 2]):
        pages = LayerKV(kv.keys.clone(), kv.values.clone())
        two = StepBatch(
            positions[tokens], slots[tokens], rows_batch.tables, [Span(0, 2, start)], []
        )
        queries = reference.rope_write(qkv[tokens], case.heads, rope, pages, two)
        want = reference.attention(queries, pages, two, options)
        torch.testing.assert_close(got[tokens], want, atol=1e-4, rtol=1e-3)


@inside
def test_qk_norm() -> None:
    from windlass.kernels.triton.norm import qk_norm

    qkv, weights = torch.randn(3, 100), (torch.randn(48), torch.randn(20))
    want = reference.qk_norm(qkv, *weights, 1e-5)
    torch.testing.assert_close(qk_norm(qkv, *weights, 1e-5), want)
