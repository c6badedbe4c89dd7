"""Prompts split over ranks: the numbers of one process, with 2 and 4 real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lora.folders import write_adapter, write_model
from tests.parallel.pool import pooled_ranks
from tests.parallel.test_matrix import (
    BASE,
    FAMILIES,
    FORMATS,
    GREEDY,
    PROMPTS,
    assert_equal,
    make,
    results,
)
from tests.quant.ranks import in_threads, thread_groups
from tests.speculative import test_heads
from tests.tools.plan.test_scaling import MLA, MOE, model_of
from windlass import SamplingParams
from windlass.config import EngineConfig
from windlass.core.types import StepPlan
from windlass.errors import ConfigError
from windlass.kernels.batch import StepBatch
from windlass.kernels.gemm_io import InputQuant, QuantisedInputs
from windlass.kernels.native.ops import prompt_spans
from windlass.kernels.native.pool import Workers
from windlass.kernels.token_split import TokenSplit, min_split_tokens
from windlass.models.rank_weights import RankShape
from windlass.parallel.segment import Exchange
from windlass.runner.collectives import SharedMemoryGroup
from windlass.runner.inputs import StepShape
from windlass.runner.sequence_parallel import SequenceParallel
from windlass.tools.plan.rank_work import StepSize

# Chunks of 37 tokens do not divide; those of 16 and more are split.
SPLIT = {
    "max_num_batched_tokens": 37,
    "enable_sequence_parallel": True,
    "sequence_parallel_min_tokens": 16,
}
MODELS: dict[str, dict[str, Any]] = FAMILIES | {
    "latents of queries": FAMILIES["mla"] | {"q_lora_rank": 24},
    "parallel": {"architectures": ["CohereForCausalLM"], "logit_scale": 0.5},
}
FOUR = ("dense", "moe", "windows", "latents of queries")  # also with four ranks
DENSE, MLA_QUERIES = MODELS["dense"], MODELS["latents of queries"]


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[None]:
    with pooled_ranks():
        yield


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the steps that rank 0 split."""
    found: list[int] = []
    made = TokenSplit.__init__

    def counted(self: TokenSplit, ranks: Any, num_tokens: int, *rest: Any) -> None:
        found.append(num_tokens)
        made(self, ranks, num_tokens, *rest)

    monkeypatch.setattr(TokenSplit, "__init__", counted)
    return found


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE | config))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_families(name: str, splits: list[int], tmp_path: Path) -> None:
    folder = write(tmp_path, MODELS[name])
    want = results(make(folder, 1, load_format="dummy"))
    for size in (2, 4) if name in FOUR else (2,):
        llm = make(folder, size, load_format="dummy", **SPLIT)
        assert_equal(results(llm), want)
        assert_equal(results(llm), want)  # with prefix hits
        assert llm.engine.stats().prefix_hits
        assert 37 in splits
        assert min(splits) >= 16
        splits.clear()
        del llm


def test_decode_steps_are_not_split(splits: list[int], tmp_path: Path) -> None:
    llm = make(write(tmp_path, DENSE), 2, load_format="dummy", **SPLIT)
    (choice,) = (each for each in llm.report.choices if each.what == "sequence parallelism")
    assert choice.value == "prompts over 2 ranks, from 16 tokens of a step"
    llm.generate([PROMPTS[0]], GREEDY)
    assert splits == [37, 37], "and one token of the prompt is left"
    splits.clear()
    llm.generate([[9] * 30], SamplingParams(max_tokens=2, deterministic=True))
    assert splits == []


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("name", ["int8", "gptq act-order"])
def test_formats(name: str, backend: str, splits: list[int], tmp_path: Path) -> None:
    """Native kernels in recorded steps, beside which split ones run operator by operator."""
    path = FORMATS[name](tmp_path)
    want = results(make(path, 2))
    assert_equal(results(make(path, 2, distributed_backend=backend, **SPLIT)), want)
    assert splits


def test_stages(splits: list[int], tmp_path: Path) -> None:
    folder = write(tmp_path, MLA_QUERIES | {"num_hidden_layers": 4})
    want = results(make(folder, 1, load_format="dummy"))
    llm = make(folder, 2, load_format="dummy", pipeline_parallel_size=2, **SPLIT)
    assert_equal(results(llm), want)
    assert splits


@pytest.mark.parametrize("combine", ["all-reduce", "all-to-all"])
def test_experts_of_ranks(combine: str, splits: list[int], tmp_path: Path) -> None:
    folder = write(tmp_path, FAMILIES["moe"])
    want = results(make(folder, 1, load_format="dummy"))
    options = {"enable_expert_parallel": True, "expert_combine": combine, **SPLIT}
    assert_equal(results(make(folder, 4, load_format="dummy", **options)), want)
    assert splits


@pytest.mark.parametrize("name", ["dense", "latents of queries"])
def test_adapters_and_prompt_logprobs(name: str, splits: list[int], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    options: dict[str, Any] = {"load_format": "dummy"}
    if name == "dense":
        adapter = write_adapter(tmp_path / "a")
        options |= {"enable_lora": True, "lora_modules": (f"a={adapter}",)}
    else:
        write(folder, MLA_QUERIES)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=1, logprobs=2)

    def found(size: int, **more: Any) -> list[Any]:
        llm = make(folder, size, **options, **more)
        names = ["a", "", "a", ""] if name == "dense" else ""
        outputs = llm.generate(PROMPTS, sampling, adapter=names)
        scores = [each.prompt_logprobs for each in outputs]
        return [
            [each.outputs[0].token_ids for each in outputs],
            [score.logprob for each in scores for score in each or () if score is not None],
        ]

    tokens, logprobs = found(1)
    split_tokens, split_logprobs = found(2, **SPLIT)
    assert split_tokens == tokens
    assert split_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert splits


@pytest.mark.slow
def test_heads_read_hidden_states_of_all_tokens(splits: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(test_heads.CONFIG))
    head = test_heads.eagle(tmp_path / "head")
    want = results(make(tmp_path, 1, load_format="dummy"))
    options = {"spec": "eagle", "spec_model": str(head), "num_blocks": 128, **SPLIT}
    assert_equal(results(make(tmp_path, 2, load_format="dummy", **options)), want)
    assert splits


@pytest.mark.parametrize(
    "config",
    [MOE, MLA | {"q_lora_rank": 24}, BASE | MODELS["heads of two sizes"]],
    ids=["experts", "latents", "heads of two sizes"],
)
def test_collectives_are_those_of_the_formula(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`windlass plan` counts what the ranks exchange; a reduce-scatter is of all tokens."""
    steps: list[tuple[StepPlan, list[tuple[str, int]]]] = []

    def record(name: str, kind: str, *, sums_rows: bool = False) -> None:
        method = getattr(SharedMemoryGroup, name)

        def recorded(self: SharedMemoryGroup, x: Tensor, *sizes: Any) -> Tensor:
            before = list(steps[-1][1]) if steps else []
            found = method(self, x, *sizes)
            if steps:  # without the collectives of which this one consists
                steps[-1][1][:] = [*before, (kind, x.nbytes if sums_rows else found.nbytes)]
            return found

        monkeypatch.setattr(SharedMemoryGroup, name, recorded)

    record("all_reduce", "all-reduce")
    record("all_gather", "all-gather")
    record("reduce_scatter", "reduce-scatter", sums_rows=True)
    work = model_of(tmp_path, config, dtype="float32").work(RankShape(tp=2), 16)
    (stage,) = work.network.stages(1)
    llm = make(tmp_path, 2, load_format="dummy", **SPLIT)
    llm.engine.watch_plans(lambda plan: steps.append((plan, [])))
    llm.generate([list(range(60))], SamplingParams(max_tokens=2, ignore_eos=True))
    sizes = [
        (sum(row.num_tokens for row in plan.rows), sum(row.sample for row in plan.rows))
        for plan, _ in steps
    ]
    assert sizes == [(37, 0), (23, 1), (1, 1)]
    for (tokens, num_sampled), (_, found) in zip(sizes, steps, strict=True):
        size = StepSize(tokens, rows=max(1, num_sampled), context=1)
        expected = [(each.kind, each.num_bytes) for each in work.stage(stage, size).collectives]
        assert found == (expected if num_sampled else expected[:-1]), (
            "no logits, if none is sampled"
        )
    kinds = [{kind for kind, _ in found} for _, found in steps]
    assert ["reduce-scatter" in found for found in kinds] == [True, True, False]


def shape(**fields: Any) -> StepShape:
    return StepShape(**(dict.fromkeys(StepShape._fields, 0) | fields))


def test_which_steps_are_split(tmp_path: Path) -> None:
    rule = SequenceParallel(thread_groups(2)[0], 256)  # type: ignore[arg-type]
    assert rule.splits(shape(num_tokens=256))
    assert not rule.splits(shape(num_tokens=256, num_sampled=1)), "the last one is sampled"
    assert not rule.splits(shape(num_tokens=2000, num_sampled=1900)), "tokens of decodes"
    assert not rule.splits(shape(num_tokens=256, batch_invariant=True))
    folder = write(tmp_path, DENSE)
    with pytest.raises(
        ConfigError, match=r"up to 37 tokens .* --sequence-parallel-min-tokens is 9"
    ):
        make(folder, 2, load_format="dummy", **SPLIT | {"sequence_parallel_min_tokens": 90})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "--tensor-parallel-size, which is 1"),
        ({"tensor_parallel_size": 4, "sequence_parallel_min_tokens": 15}, "at least 16"),
        ({"enable_sequence_parallel": False, "sequence_parallel_min_tokens": 99}, "does nothing"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(model="m", **{"enable_sequence_parallel": True} | options)


@pytest.mark.parametrize(("size", "num_tokens"), [(2, 7), (3, 10), (4, 16), (4, 17)])
def test_a_split(size: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    parts = torch.randn(size, num_tokens, 5)  # summands of the ranks
    whole, tokens = parts.sum(0), torch.tensor([num_tokens - 1, 0, 3], dtype=torch.int32)

    def call(group: Any) -> Tensor:
        split = TokenSplit(group, num_tokens)
        rows = split.reduce_scatter(parts[group.rank])
        torch.testing.assert_close(rows, split.own(whole))
        torch.testing.assert_close(split.pick(rows, tokens), whole[tokens])
        codes = rows.to(torch.float8_e4m3fn)
        quantised = split.gather(QuantisedInputs(codes, rows[:, :1], torch.float32))
        assert isinstance(quantised, QuantisedInputs)
        assert torch.equal(quantised.codes.float(), whole.to(torch.float8_e4m3fn).float())
        assert torch.equal(quantised.scales, split.gather_rows(rows)[:, :1])
        doubled = split.project(lambda x: x * 2, rows)  # type: ignore[operator, return-value]
        torch.testing.assert_close(doubled, 2 * whole)
        found = split.gather(rows)
        assert split.gather(found) is found
        assert isinstance(found, Tensor)
        return found

    found = in_threads([lambda group=group: call(group) for group in thread_groups(size)])
    assert len(found) == size
    for each in found:
        torch.testing.assert_close(each, whole)


def test_every_rank_has_a_token() -> None:
    for size in range(2, 33):
        for num_tokens in (min_split_tokens(size), min_split_tokens(size) + 1):
            group = thread_groups(size)[0]
            counts = TokenSplit(group, num_tokens).counts
            assert sum(counts) == num_tokens
            assert min(counts) > 0
            assert len({*counts[:-1]}) == 1


def test_norms_quantise_if_all_readers_want_it() -> None:
    class Norm:
        def input_quant(self, num_rows: int) -> InputQuant | None:
            return InputQuant("rows") if num_rows > 8 else None

    split = TokenSplit(thread_groups(2)[0], 17)
    assert split.counts == [9, 8]
    assert split.is_unquantised(Norm())  # type: ignore[arg-type]
    assert not TokenSplit(thread_groups(2)[0], 18).is_unquantised(Norm())  # type: ignore[arg-type]


def test_planes_of_tokens_are_not_gathered() -> None:
    class Norm:
        def input_quant(self, num_rows: int) -> InputQuant | None:
            del num_rows
            return InputQuant("planes", 256, 128)

    assert TokenSplit(thread_groups(2)[0], 18).is_unquantised(Norm())  # type: ignore[arg-type]


def test_prompt_tokens_of_a_slice() -> None:
    batch = StepBatch(
        positions=torch.arange(12),
        token_slots=torch.zeros(12),
        tables=torch.zeros(1, 1, 1),
        spans=[],
        kv=[],
        prompts=[(1, 3), (5, 9), (10, 12)],
    )
    pool = Workers(1).pool
    with prompt_spans(pool, batch):
        outer = pool._step
        with prompt_spans(pool, batch, range(6, 11)):
            step = pool._step
            assert step is not None
            assert (step.num_tokens, step.num_prompts, step.num_sampled) == (5, 2, 0)
        assert pool._step is outer
    assert pool._step is None


@pytest.mark.parametrize(("size", "rows"), [(2, 5), (3, 401), (4, 1000)])
def test_native_collectives(size: int, rows: int) -> None:
    """Of more values than fit the shared memory at once, as threads of one process."""
    torch.manual_seed(1)
    exchange, width = Exchange.of(size), 2200
    groups = [
        SharedMemoryGroup(exchange, group, Workers(1).pool)  # type: ignore[arg-type]
        for group in thread_groups(size)
    ]
    parts = torch.randn(size, rows, width)
    counts = [min(-(-rows // size), rows - -(-rows // size) * rank) for rank in range(size)]

    def call(group: SharedMemoryGroup) -> Tensor:
        own = group.reduce_scatter(parts[group.rank], counts)
        whole = group.all_reduce(parts[group.rank])
        assert torch.equal(own, whole.split(counts)[group.rank]), "the same sums, to the bit"
        found = group.all_gather(own.flatten(), [count * width for count in counts])
        assert torch.equal(found.view(rows, width), whole)
        return whole

    found = in_threads([lambda group=group: call(group) for group in groups])
    assert len(found) == size
