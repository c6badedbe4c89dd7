"""Steps that compute only what is read behind the last attention: the same numbers, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lora.adapters import ALL, Parts, make_adapter
from tests.quant.folders import IDS, write_plain
from windlass.core.types import RowResult, StepOptions
from windlass.kernels.native.compiler import find_compilers
from windlass.runner.drafter import DrafterInputs

_COMPILERS, _ = find_compilers()
pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

ONE = make_adapter("one", ALL, 1)
HEAD = make_adapter("head", {"self_attn.o_proj": 3, "mlp.down_proj": 2, "lm_head": 8}, 3)
INT4 = {"quantization": "int4", "quantize_head": True}
READ = [
    1,
    1,
    4,
    2,
    3,
]  # rows that sample in each step of `play`; the first step has none and reads one position
TOKENS = [9, 17, 15, 4, 3]


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("model") / "base", tied=request.param)


def play(parts: Parts, adapters: tuple[int, int, int]) -> list[RowResult]:
    """Three requests: prompt chunks beside last chunks, single tokens and draft tokens."""
    a, b, c = admitted = [
        parts.admit(prompt, logprobs=3) for prompt in (IDS * 2, IDS[::-1], IDS[3:])
    ]
    of_a, of_b, of_c = adapters
    found = parts.run([parts.row(a, 0, 9, of_a)], admitted)
    found += parts.run([parts.row(a, 9, 6, of_a), parts.row(b, 0, 11, of_b)])
    b.tokens.append(4)
    rows = [parts.row(a, 15, 7, of_a), parts.row(c, 0, 5, of_c), parts.row(b, 11, 1, of_b, (7, 9))]
    found += parts.run(rows)
    a.tokens.append(5)
    found += parts.run([parts.row(c, 5, 3, of_c), parts.row(a, 22, 1, of_a)])
    for one in admitted:
        one.tokens.append(6)
    ends = [len(one.tokens) - 1 for one in admitted]
    last = zip(admitted, ends, adapters, strict=True)
    return found + parts.run([parts.row(one, at, 1, slot) for one, at, slot in last])


def played(
    folder: Path, adapters: tuple[int, int, int], needs_all_hidden: bool, **options: Any
) -> tuple[list[RowResult], list[int]]:
    """The results, and the number of hidden states of each step."""
    parts = Parts(folder, [ONE, HEAD], **options)
    parts.options = StepOptions(needs_all_hidden=needs_all_hidden)
    seen: list[int] = []
    parts.network.register_forward_hook(lambda *call: seen.append(len(call[-1])))
    return play(parts, adapters), seen


@pytest.mark.parametrize("adapters", [(0, 0, 0), (1, 0, 2), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("options", [INT4, {"quantization": "w8a8"}], ids=str)
def test_logits_indices_give_the_logits_of_a_full_forward(
    folder: Path, options: dict[str, Any], adapters: tuple[int, int, int]
) -> None:
    want, whole = played(folder, adapters, True, **options)
    got, some = played(folder, adapters, False, **options)
    assert (whole, some) == (TOKENS, READ)
    assert got == want
    assert sum(len(result.logprobs or ()) for result in want) >= 7


def scores(found: list[RowResult]) -> list[float]:
    return [score.logprob for one in found for score in one.logprobs or ()]


def test_captured_steps_give_the_same(folder: Path) -> None:
    want, _ = played(folder, (0, 0, 0), True, **INT4)
    got, seen = played(folder, (0, 0, 0), False, enforce_eager=False, **INT4)
    assert got == want
    assert not seen


@pytest.mark.parametrize(
    ("whole", "some"),
    [
        (INT4, {"enforce_eager": False, **INT4}),
        ({"plain_kernels": True, "dtype": "float32"}, {"plain_kernels": True, "dtype": "float32"}),
    ],
    ids=["recorded", "plain"],
)
def test_another_summation_order_stays_close(
    folder: Path, whole: dict[str, Any], some: dict[str, Any]
) -> None:
    """Recorded adapters add to the residual; torch's products depend on the number of rows."""
    want, _ = played(folder, (1, 0, 2), True, **whole)
    got, _ = played(folder, (1, 0, 2), False, **some)
    assert scores(got) == pytest.approx(scores(want), abs=1e-4)


def test_prompt_logprobs_cover_the_whole_prompt(folder: Path) -> None:
    parts = Parts(folder, **INT4)
    one, beside = parts.admit(IDS, prompt_logprobs=1), parts.admit(IDS)
    rows = [parts.row(beside, 0, len(IDS)), parts.row(one, 0, len(IDS))]
    scored = parts.run(rows, [one, beside])[1].prompt_logprobs
    assert [score.token for score in scored or ()] == IDS[1:]


class _Reader:
    """Drafts zeros, and records the inputs of drafting heads."""

    layers = (1,)

    def __init__(self) -> None:
        self.read: list[Tensor] = []
        self.aux_hidden_states: list[Tensor] = []

    def draft(self, found: DrafterInputs, count: int) -> Tensor:
        self.read.append(found.hidden[found.read])
        self.aux_hidden_states.append(found.aux_hidden_states[1])
        return torch.zeros(len(found.last), count, dtype=torch.int32)

    def copy(self, pairs: object) -> None:
        del pairs


def test_heads_read_the_hidden_state_of_the_last_accepted_token(folder: Path) -> None:
    readers = []
    for needs_all_hidden in (True, False):
        parts, reader = Parts(folder, **INT4), _Reader()
        parts.runner.attach(reader)
        parts.options = StepOptions(draft_length=2, needs_all_hidden=needs_all_hidden)
        play(parts, (0, 0, 0))
        readers.append(reader)
    whole, some = readers
    assert [len(rows) for rows in some.read] == [0, 1, 2, 2, 3]
    assert [len(states) for states in some.aux_hidden_states] == TOKENS
    for one, other in zip(
        whole.read + whole.aux_hidden_states, some.read + some.aux_hidden_states, strict=True
    ):
        assert torch.equal(one, other)
