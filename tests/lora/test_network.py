"""Networks with adapters: against merged weights, in mixed batches, on quantised base models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lora.adapters import ALL, SHAPES, Parts, make_adapter, merge
from tests.models import tiny
from tests.models.tiny import Type, write_gguf
from tests.quant.folders import IDS, write_plain
from windlass.core.types import BlockId
from windlass.kernels.lora import Lora
from windlass.layers.linear import Linear
from windlass.lora.base import Adapter
from windlass.runner.adapters import grouped

ONE = make_adapter("one", ALL, 1)
SOME = make_adapter("some", {"self_attn.q_proj": 3, "self_attn.v_proj": 16, "mlp.up_proj": 1}, 2)
HEAD = make_adapter("head", {"mlp.down_proj": 2, "lm_head": 8}, 3)
ADAPTERS = [ONE, SOME, HEAD]
PROMPTS = [IDS, IDS[::-1], IDS[3:], [7], IDS[:6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_plain(tmp_path_factory.mktemp("model") / "base")


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_equals_merged_weights(folder: Path, tmp_path: Path, adapter: Adapter) -> None:
    exact = {"dtype": "float32"}  # KV cache too
    (want,) = Parts(merge(folder, tmp_path / "merged", adapter), **exact).scores([IDS], [0])
    parts = Parts(folder, [adapter], **exact)
    (whole,) = parts.scores([IDS], [1])
    (chunked,) = parts.scores([IDS], [1], [4, 1, 6])
    assert_near(whole, want)
    assert_near(chunked, want)
    (base,) = parts.scores([IDS], [0])
    assert (base - want).abs().max() > 0.1, "the adapter changes the logits too little"


def test_adapter_of_a_tied_head_leaves_the_embedding_unchanged(tmp_path: Path) -> None:
    exact = {"dtype": "float32"}
    tied = write_plain(tmp_path / "tied", tied=True)
    (want,) = Parts(merge(tied, tmp_path / "merged", HEAD), **exact).scores([IDS], [0])
    (got,) = Parts(tied, [HEAD], **exact).scores([IDS], [1])
    assert_near(got, want)


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int4"}, {"plain_kernels": True}], ids=str
)
def test_mixed_batches_match_single_adapters(folder: Path, options: dict) -> None:
    """Each row matches a batch with its adapter only; base rows are bitwise equal."""
    parts = Parts(folder, ADAPTERS, **options)
    wanted = [1, 0, 2, 3, 1]
    for chunks in ([100], [3, 1, 7]):
        mixed = parts.scores(PROMPTS, wanted, chunks)
        base = parts.scores(PROMPTS, [0] * len(wanted), chunks)
        assert torch.equal(mixed[1], base[1])
        for i, slot in enumerate(wanted):
            alone = [slot if j == i else 0 for j in range(len(wanted))]
            assert_near(mixed[i], parts.scores(PROMPTS, alone, chunks)[i])


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("options", [{}, {"quantization": "int4", "quantize_head": True}], ids=str)
@pytest.mark.parametrize("adapters", [ADAPTERS, []], ids=["adapters", "base"])
def test_captured_programs_match_eager(
    tmp_path: Path, adapters: list[Adapter], options: dict, bias: bool
) -> None:
    """Rows with and without adapters, prefill and decode: the same bits; the reference kernels agree."""
    folder = write_plain(tmp_path / "base", attention_bias=bias, mlp_bias=bias)
    found, num_slots = [], 1 + len(adapters)
    modes: list[dict[str, bool]] = [{"enforce_eager": False}, {}, {"plain_kernels": True}]
    for mode in modes[: 2 if options else 3]:
        parts = Parts(folder, adapters, **options, **mode)
        admitted = [parts.admit(prompt, logprobs=2) for prompt in PROMPTS]
        scores = []
        for start, count in ((0, 3), (3, 1), (4, 100)):
            live = [one for one in admitted if len(one.tokens) > start]
            rows = [
                parts.row(
                    one, start, min(count, len(one.tokens) - start), int(one.slot) % num_slots
                )
                for one in live
            ]
            for result in parts.run(rows, admitted if start == 0 else ()):
                scores += [each.logprob for each in result.logprobs or []]
        found.append(scores)
    assert len(found[0]) == len(PROMPTS)
    assert found[1] == found[0]
    assert found[-1] == pytest.approx(
        found[0], abs=0.02
    )  # the reference attention computes in float32


@pytest.mark.parametrize(
    "options", [{}, {"plain_kernels": True}, {"quantization": "int4"}], ids=str
)
def test_int8_adapters_stay_close_to_exact(folder: Path, options: dict) -> None:
    """The error is below 5 % of the delta; base rows in the batch are bitwise equal."""
    exact = Parts(folder, ADAPTERS, **options)
    coded = Parts(folder, ADAPTERS, lora_dtype="int8", **options)
    wanted = [1, 0, 2, 3, 1]
    for chunks in ([100], [3, 1, 7]):
        base = exact.scores(PROMPTS, [0] * len(wanted), chunks)
        want, got = (parts.scores(PROMPTS, wanted, chunks) for parts in (exact, coded))
        assert torch.equal(got[1], base[1])
        for i in (0, 2, 3, 4):
            assert (got[i] - want[i]).norm() < 0.05 * (want[i] - base[i]).norm()


def test_base_rows_in_captured_steps_are_bitwise_equal_with_adapters(folder: Path) -> None:
    """A base request has bitwise equal tokens and logprobs with and without adapters in the step."""
    found = []
    for slot in (0, 1):
        given = {"quantization": "int4", "quantize_head": True, "enforce_eager": False}
        parts = Parts(folder, [ONE], **given)
        base, other = parts.admit(IDS, logprobs=2), parts.admit(IDS[::-1], logprobs=2)
        rows = [parts.row(base, 0, len(IDS)), parts.row(other, 0, len(IDS), slot)]
        found.append(parts.run(rows, [base, other]))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_deterministic_requests_are_batch_invariant_with_adapters(folder: Path) -> None:
    found = []
    for beside in (0, 3):
        parts = Parts(folder, [ONE], enforce_eager=False)
        params = {"deterministic": True, "logprobs": 2}
        one = parts.admit(IDS, **params)
        others = [parts.admit(IDS[i:]) for i in range(1, 1 + beside)]
        rows = [parts.row(each, 0, len(each.tokens), 1) for each in (*others, one)]
        found.append(parts.run(rows, [*others, one])[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["int4", "int8", "w8a8", "Q4_1"])
def test_deltas_on_quantised_weights(folder: Path, tmp_path: Path, form: str) -> None:
    """Each layer adds the exact LoRA delta, for every format of the base weights."""
    shapes, ranks, options = SHAPES, ALL, {"quantization": form}
    if form == "Q4_1":
        folder = write_gguf(tmp_path / "m.gguf", kind=Type.Q4_1)
        q, kv = tiny.HEADS * tiny.HEAD_DIM, tiny.KV_HEADS * tiny.HEAD_DIM
        shapes = {
            "self_attn.q_proj": (q, tiny.HIDDEN),
            "self_attn.v_proj": (kv, tiny.HIDDEN),
            "mlp.down_proj": (tiny.HIDDEN, tiny.FFN),
        }
        ranks, options = dict.fromkeys(shapes, 4), {}
    adapter = make_adapter("a", ranks, shapes=shapes)
    parts = Parts(folder, [adapter], **options)
    assert all(torch.isfinite(each).all() for each in parts.scores([IDS, IDS], [1, 0]))
    rows = grouped(torch.tensor([1, 0, 1]).numpy(), torch.device("cpu"))
    for path, layer in parts.network.named_modules():
        if not isinstance(layer, Linear) or path == "lm_head":
            continue
        assert layer.gemms
        assert isinstance(layer.lora, Lora)
        x = torch.randn(3, layer.num_in)
        base = layer(x)
        change = layer(x, rows) - base
        parent, want = path.rpartition(".")[0], []
        for part, size in layer.parts.items():
            low = adapter.modules.get(f"{parent}.{part}")
            want.append(torch.zeros(3, size) if low is None else x @ low.down.T @ low.up.T)
        expected = torch.cat(want, dim=1)
        assert_near(change[[0, 2]], expected[[0, 2]])
        assert torch.equal(layer(x, rows)[1], base[1])


def test_draft_tokens_are_verified_with_the_adapter(folder: Path) -> None:
    parts = Parts(folder, ADAPTERS, quantization="int4")
    tokens = parts.answer(IDS, 1, 8)
    assert tokens != parts.answer(IDS, 0, 8)
    one, base = parts.admit(IDS), parts.admit(IDS)
    drafts = [tokens[1], tokens[2], (tokens[3] + 1) % 97, tokens[4]]
    rows = [parts.row(one, 0, len(IDS), 1), parts.row(base, 0, len(IDS))]
    assert parts.run(rows, [one, base])[0].tokens == tokens[:1]
    one.tokens.append(tokens[0])
    base.tokens.append(tokens[0])
    rows = [parts.row(each, len(IDS), 1, slot, drafts) for each, slot in ((one, 1), (base, 0))]
    results = parts.run(rows)
    assert results[0].tokens == tokens[1:4]
    assert results[1].tokens != tokens[1:4]


def test_cached_blocks_are_reused_within_an_adapter(folder: Path) -> None:
    parts = Parts(folder, ADAPTERS)
    prompt = [(5 * i) % 97 for i in range(40)]
    want = parts.answer(prompt, 2, 3)  # uses the first blocks, 0 to 2
    one = parts.admit(prompt)
    row = parts.row(one, 32, 8, 2)
    again = parts.run([row._replace(blocks=(BlockId(0), BlockId(1), *row.blocks))], [one])
    assert again[0].tokens == want[:1]


def test_put_replaces_the_previous_adapter_completely(folder: Path) -> None:
    parts = Parts(folder, [ONE])
    parts.scores([IDS], [1])
    parts.bank.put(1, SOME)
    (got,) = parts.scores([IDS], [1])
    (want,) = Parts(folder, [SOME]).scores([IDS], [1])
    assert torch.equal(got, want)
