"""The kernels between an EAGLE head's GEMMs, in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside

pytest.importorskip("triton")

SIZE, VOCAB, DRAFTS, ROWS, EPS = 24, 50, 21, 5, 1e-5


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


def make_steps():
    from windlass.kernels.triton.eagle import FusedSteps

    torch.manual_seed(0)
    table, gains, hidden_gains = torch.randn(VOCAB, SIZE), torch.randn(SIZE), torch.randn(SIZE)
    return FusedSteps(
        table=table,
        gains=gains,
        hidden_gains=hidden_gains,
        eps=EPS,
        offsets=torch.arange(DRAFTS) + 3,
        max_positions=100,
    )


def expected_inputs(steps, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    embedded = rms_norm(steps.table[ids], (SIZE,), steps.gains, EPS)
    return torch.cat((embedded, rms_norm(hidden, (SIZE,), steps.hidden_gains, EPS)), dim=-1)


@inside
def test_inputs() -> None:
    steps = make_steps()
    ids, hidden = torch.randint(VOCAB, (ROWS,), dtype=torch.int32), torch.randn(ROWS, SIZE)
    torch.testing.assert_close(
        steps.inputs(ids, hidden), expected_inputs(steps, ids.long(), hidden)
    )


@inside
def test_select() -> None:
    steps = make_steps()
    indices = torch.tensor([8, 0, 3], dtype=torch.int32)
    normed, hidden = torch.randn(9, SIZE), torch.randn(9, SIZE)
    positions, slots = torch.arange(9, dtype=torch.int32) * 7, torch.arange(9, dtype=torch.int32)
    found = steps.select(indices, normed, hidden, positions, slots)
    for got, want in zip(found, (normed, hidden, positions, slots), strict=True):
        assert torch.equal(got, want[indices.long()])


@inside
def test_advance() -> None:
    steps = make_steps()
    logits, hidden = torch.randn(ROWS, DRAFTS), torch.randn(ROWS, SIZE)
    logits[2, 4] = logits[2, 9] = 9.0  # ties go to the lower token
    positions = torch.tensor([5, 98, 99, 0, 7], dtype=torch.int32)
    tokens, after, out = steps.advance(logits, hidden, positions)
    best = logits.argmax(-1)
    assert best[2] == 4
    assert torch.equal(tokens.long(), best + steps.offsets[best])
    assert after.tolist() == [6, 99, 99, 1, 8]
    torch.testing.assert_close(out, expected_inputs(steps, tokens.long(), hidden))
