"""The executors with captured graphs, without a GPU: a fake graph backend replays by computing again.

The kernels run in Triton's interpreter; the network is a toy that reads tokens, positions and block
tables. Tokens must equal those of eager steps with the sampler of the host.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from random import Random
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.core.schedulers import make_scheduler
from tests.core.world import make_layout
from tests.kernels.conftest import Check
from tests.parallel.stages import Line
from tests.runner.memory_walk import walk
from windlass.core.blocks import BlockPool
from windlass.core.grammars import NoGrammars
from windlass.core.limits import SchedulerLimits
from windlass.core.pooling import PoolingParams
from windlass.core.reasoning import ReasoningPhase
from windlass.core.sampling import SamplingParams
from windlass.core.types import (
    GrammarFailure,
    NewRequest,
    Output,
    SlotInit,
    StepOptions,
    StepPlan,
    StepResult,
)
from windlass.engine import Engine
from windlass.kernels.batch import StepBatch
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.native.pool import Workers
from windlass.runner import filters
from windlass.runner.cuda import graphs
from windlass.runner.cuda.decode import DecodeGraphs, decode_forward
from windlass.runner.cuda.metadata import DeviceMetadata
from windlass.runner.cuda.mixed import MixedForward, MixedGraphs
from windlass.runner.cuda.stage import GraphStage
from windlass.runner.cuda.verify import MAX_POSITIONS, VerifyForward, VerifyGraphs
from windlass.runner.drafter import DrafterInputs
from windlass.runner.eager import EagerExecutor, ReferenceMetadata, RunnerParts
from windlass.runner.executor import Executor, PendingStep
from windlass.runner.pipeline import NoSampling, Pipeline
from windlass.runner.runner import Runner
from windlass.runner.sampler import Sampler
from windlass.runner.sampling import HostSampling, Sampling
from windlass.runner.slots import SlotTables
from windlass.text.grammar.matcher import RequestMatcher
from windlass.text.grammar.reasoning import ReasoningFollower

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")
CPU = torch.device("cpu")
VOCAB, SLOTS, BLOCK, MAX_LEN = 61, 4, 4, 64


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_executors_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


class Arrived:
    """A copy as it was when it was started."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.clone()

    def wait(self) -> Tensor:
        return self._copy


class FakeBackend:
    """Replays a graph by computing it again into the same outputs, and overwrites those of all others."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._outputs: list[tuple[Tensor, ...]] = []

    def host_buffer(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def copy_to_host(self, tensor: Tensor) -> Arrived:
        return Arrived(tensor)

    def capture(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        outputs = compute()
        self._outputs.append(outputs)

        def replay() -> None:
            self.num_replays += 1
            found = compute()
            for others in self._outputs:
                for each in others:
                    each.fill_(-1)
            for old, new in zip(outputs, found, strict=True):
                old.copy_(new)

        return replay, outputs


class ToyNetwork:
    """Stores tokens in paged memory; logits depend on all tokens of a slot up to a position."""

    def __init__(self) -> None:
        self._pages = torch.zeros(202, BLOCK, dtype=torch.int64)
        self.long_contexts: Counter[bool] = Counter()

    def __call__(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        del aux_hidden_states
        if batch.work is not None:
            self.long_contexts[batch.work.long_contexts] += 1
        slots, positions = batch.token_slots.long(), batch.positions.long()
        tables = batch.tables[-1, slots].long()
        own = tables.gather(1, positions[:, None] // BLOCK)[:, 0]
        self._pages[own, positions % BLOCK] = ids.long()
        context = self._pages[tables].flatten(1)
        at = torch.arange(context.shape[1])
        hidden = ((context + 1) * (at + 3) * (at <= positions[:, None])).sum(1, keepdim=True) % 997
        indices = batch.logits_indices
        return hidden if indices is None else hidden[indices.tokens.long()]

    def logits(self, hidden: Tensor, adapters: object = None) -> Tensor:
        del adapters
        ids = torch.arange(VOCAB)
        # No two tokens have equal logits, so that the argmax is unique.
        return (((hidden * 13 + ids * ids * 3 + ids * hidden) % 97) * VOCAB + ids).float() / VOCAB


class Pages:
    """A KV cache without pages."""

    layers: list[Any] = []  # noqa: RUF012
    pages = None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs


class Oracle:
    """A drafter that knows the toy network's next tokens at the drafted positions, with errors."""

    layers: tuple[int, ...] = ()
    num_siblings = 0

    def __init__(self, network: Any) -> None:
        self._network = network

    def draft(self, inputs: DrafterInputs, count: int, siblings: int = 0) -> Tensor:
        del siblings
        last = inputs.last.long()
        token, position = inputs.following[last], inputs.batch.positions[last] + 1
        slots = inputs.batch.token_slots[last]
        drafts = []
        for ahead in range(count):
            batch = inputs.decode_batch(position + ahead, slots)
            token = self._network.logits(self._network(token, batch)).argmax(-1)
            drafts.append(torch.where((position + ahead) % 5 == 3, (token + 1) % VOCAB, token))
        return torch.stack(drafts, 1).int()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        del pairs


def greedy_tokens(
    logits: Tensor, sampling: Tensor, _seeds: Tensor, slots: Tensor, _at: Tensor, last: Tensor
) -> Tensor:
    """`sample` with torch, for greedy rows: the interpreter is slow for it."""
    assert not sampling[:, 0].any()
    tokens = logits.argmax(-1).int()
    last[slots.long()] = tokens
    return tokens


def changed_logits(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    mask_rows: Tensor,
    tables: Tensor,
    penalties: Tensor,
    masks: Tensor,
) -> Tensor:
    """`change_logits` with torch."""
    scores = logits[rows.long()].float()
    for slot, mask, x in zip(slots, mask_rows, scores, strict=True):
        bias, counts = tables[slot].tolist()
        if bias:
            x += at_address(bias, torch.float32)
        if counts:
            known = at_address(counts, torch.int32)
            x[:] = filters.penalise(x, known >> 1, known > 0, *penalties[slot].tolist())
        if mask >= 0:
            bits = np.unpackbits(masks[mask].numpy().view(np.uint8), bitorder="little")
            x[torch.from_numpy(bits[:VOCAB] == 0)] = -torch.inf
    return scores


def counted_tokens(tokens: Tensor, slots: Tensor, tables: Tensor) -> None:
    """`count_tokens` with torch."""
    for token, slot in zip(tokens.tolist(), slots.tolist(), strict=True):
        counts = int(tables[slot, 1])
        if counts:
            at_address(counts, torch.int32)[token] += 2


def no_typical_acceptance(*_: object) -> None:
    raise AssertionError("no test uses typical acceptance")


def at_address(address: int, dtype: torch.dtype) -> Tensor:
    kind = ctypes.c_float if dtype == torch.float32 else ctypes.c_int32
    return torch.frombuffer((kind * VOCAB).from_address(address), dtype=dtype)


class Parity:
    """A grammar: after an even token only odd tokens may come, and the other way around."""

    def __init__(self) -> None:
        self._last = 0

    def mask(self) -> bytes:
        bits = (np.arange(VOCAB) % 2) != self._last % 2
        return np.packbits(bits, bitorder="little").tobytes()

    def reads(self, num_in_flight: int) -> bool:
        del num_in_flight
        return True

    def take(self, token: int) -> None:
        assert token % 2 != self._last % 2
        self._last = token

    def catch_up(self, output: Sequence[int]) -> None:
        self._last = output[-1] if output else 0


def never_fails(reason: str, too_slow: bool) -> None:
    raise AssertionError(reason, too_slow)


class Matchers:
    def open(self, new: SlotInit) -> Parity | RequestMatcher:
        matcher: Parity | RequestMatcher = Parity()
        if new.sampling.reasoning is not None:
            following = ReasoningFollower(new.sampling.reasoning)
            matcher = RequestMatcher(
                None, step_timeout_s=1.0, on_fail=never_fails, reasoning=following
            )
        matcher.catch_up(new.tokens[new.num_prompt :])
        return matcher

    def prefetch(self, matchers: Sequence[Parity | RequestMatcher]) -> None:
        assert matchers

    def take_failures(self) -> tuple[GrammarFailure, ...]:
        return ()


class Ready(NoGrammars):
    """Grammars that need no compilation."""

    def ready(self, request_id: str) -> bool:
        del request_id
        return True

    def acquire(self, request_id: str) -> str:
        return request_id


class FirstStage(ToyNetwork):
    """Gives the tokens, as the residual stream that `LastStage` reads."""

    def __call__(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        del batch, aux_hidden_states
        return ids.long()[:, None] * 2


class LastStage(ToyNetwork):
    """The toy network behind another stage. It changes its inputs, as layers do."""

    def __call__(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        hidden = super().__call__(ids[:, 0] // 2, batch, aux_hidden_states)
        ids += 1
        return hidden


class InTurn:
    """Two stages that compute a plan one after the other, as a runner."""

    def __init__(self, runners: list[Runner]) -> None:
        self._runners = runners

    def submit(self, plan: StepPlan) -> PendingStep:
        first, last = (runner.submit(plan) for runner in self._runners)
        assert first.wait().rows == []
        return last


def make_parts(
    sampling: Callable[[SlotTables], Sampling],
    num_groups: int = 1,
    *,
    network: Any = None,
    pipeline: Pipeline | None = None,
) -> RunnerParts:
    slots = SlotTables(SLOTS, MAX_LEN // BLOCK + 1, BLOCK, CPU, scratch=200, num_groups=num_groups)
    cache: Any = Pages()
    parts = RunnerParts(
        network=network or ToyNetwork(),
        pipeline=pipeline or Pipeline(),
        cache=cache,
        slots=slots,
        sampling=sampling(slots),
        gemm=TorchGemm(),
        workers=Workers(1),
    )
    parts.sampling.grammars = Matchers()
    return parts


def eager_runner() -> Runner:
    parts = make_parts(lambda slots: HostSampling(Sampler(VOCAB, CPU), slots))
    return Runner(parts, [EagerExecutor(parts, ReferenceMetadata(parts.slots))])


def graph_runner(
    max_draft_tokens: int = 0,
    num_groups: int = 1,
    at_start: graphs.AtStart = graphs.AtStart.ALL,
    **options: Any,
) -> tuple[Runner, FakeBackend]:
    """`options`: network and pipeline of a stage."""
    from windlass.runner.device_sampler import DeviceSampler, SamplingKernels

    backend = FakeBackend()
    kernels = SamplingKernels(
        sample=greedy_tokens,
        change_logits=changed_logits,
        count_tokens=counted_tokens,
        keep_typical=no_typical_acceptance,
    )

    def sampling(slots: SlotTables) -> Sampling:
        pipeline = options.get("pipeline")
        if pipeline is not None and not pipeline.is_last:
            return NoSampling()
        return DeviceSampler(slots, VOCAB, backend=backend, kernels=kernels)

    parts = make_parts(sampling, num_groups, **options)
    metadata = DeviceMetadata(
        parts.slots, tile=8, num_kv_heads=1, num_positions=MAX_POSITIONS, multiprocessors=4
    )
    slots, stage = parts.slots, GraphStage(parts, max_tokens=32, backend=backend)
    executors: list[Executor] = [
        DecodeGraphs(
            decode_forward(parts, stage, metadata), stage, slots, max_rows=SLOTS, at_start=at_start
        ),
        MixedGraphs(
            MixedForward(parts, stage, metadata),
            stage,
            slots,
            tile=8,
            sizes=[32],
            draft_length=max_draft_tokens,
            at_start=at_start,
        ),
        EagerExecutor(parts, metadata),
    ]
    if max_draft_tokens:
        sampler = parts.sampling
        assert isinstance(sampler, DeviceSampler)
        verify = VerifyGraphs(
            VerifyForward(parts, sampler, metadata, max_draft_tokens),
            sampler,
            slots,
            max_rows=SLOTS,
            max_draft_tokens=max_draft_tokens,
        )
        executors.insert(1, verify)
    return Runner(parts, executors), backend


class Watched:
    """A pending step that counts its executor when it arrives."""

    def __init__(self, owner: Counting, pending: PendingStep) -> None:
        self._owner, self._pending = owner, pending

    def wait(self) -> StepResult:
        result = self._pending.wait()
        self._owner.executors[result.executor] += 1
        self._owner.refusals.update(result.refusals)
        self._owner.num_prelaunched += result.prelaunched
        return result


class Counting:
    """A runner that counts which executor took each step, and may ask for drafts in each."""

    def __init__(self, runner: Runner, draft_length: int = 0) -> None:
        self._runner = runner
        self._options = StepOptions(draft_length=draft_length)
        self.executors: Counter[str] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.num_prelaunched = 0

    def run(self, plan: StepPlan) -> StepResult:
        return self.submit(plan).wait()

    def submit(self, plan: StepPlan) -> Any:
        if self._options.draft_length:
            plan = plan._replace(options=self._options)
        return Watched(self, self._runner.submit(plan))


def generate(
    runner: Counting,
    params: Sequence[SamplingParams],
    *,
    overlap: bool,
    prompts: int = 11,
    num_groups: int = 1,
    num_stages: int = 1,
    pooling: Sequence[PoolingParams | None] = (None,),
) -> dict[str, list[Output]]:
    num_blocks = 60 * num_groups
    limits = SchedulerLimits(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=24,
        max_model_len=MAX_LEN,
        layout=make_layout(*["full"] * num_groups, block_size=BLOCK),
        num_blocks=num_blocks,
        lookahead_after_drafts=4,
        num_stages=num_stages,
    )
    scheduler = make_scheduler(limits, BlockPool(num_blocks), caching=False, grammars=Ready())
    engine = Engine(scheduler, runner, overlap=overlap)
    random, found = Random(3), {}
    for i in range(prompts):
        sampling = params[i % len(params)]
        prompt = [random.randrange(VOCAB) for _ in range(random.randrange(1, 30))]
        pooled = pooling[i % len(pooling)]
        engine.add(NewRequest(str(i), prompt, sampling, pooling=pooled))
        found[str(i)] = []
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
    return found


def tokens_of(found: dict[str, list[Output]]) -> dict[str, list[int]]:
    return {name: [t for each in outputs for t in each.tokens] for name, outputs in found.items()}


REASONING = ReasoningPhase(ends=((50, 51),), closing=(49, 50, 51))
GREEDY = {"temperature": 0.0, "max_tokens": 17}
CASES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(**GREEDY)],
    "deterministic beside others": [
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, deterministic=True),
    ],
    "penalties": [
        SamplingParams(**GREEDY, repetition_penalty=1.7),
        SamplingParams(**GREEDY, frequency_penalty=1.9, presence_penalty=1.0),
        SamplingParams(**GREEDY),
    ],
    "token lists": [
        SamplingParams(**GREEDY, logit_bias={3: 90.0, 9: -90.0}),
        SamplingParams(**GREEDY, allowed_token_ids=[1, 5, 9, 33]),
        SamplingParams(
            **GREEDY, bad_token_ids=((5,), (7, 8), (20, 21, 22)), logit_bias={7: 90, 8: 95}
        ),
        SamplingParams(**GREEDY, min_tokens=9, stop_token_ids=[1, 2, 3, 4]),
    ],
    "logprobs": [
        SamplingParams(**GREEDY, logprobs=3),
        SamplingParams(**GREEDY, logprobs=0),
        SamplingParams(**GREEDY, logprobs=2, repetition_penalty=1.3),
        SamplingParams(**GREEDY, prompt_logprobs=1),
    ],
    "grammar": [
        SamplingParams(**GREEDY, structured_outputs={"regex": "x"}),
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, structured_outputs={"regex": "x"}, allowed_token_ids=[2, 4, 7]),
        SamplingParams(**GREEDY, structured_outputs={"regex": "x"}, allowed_token_ids=[2, 4]),
    ],
    "reasoning": [
        SamplingParams(**GREEDY, reasoning=replace(REASONING, max_tokens=budget))
        for budget in (0, 1, 6, 12, None)
    ],
}


def same(got: dict[str, list[Output]], want: dict[str, list[Output]]) -> None:
    assert tokens_of(got) == tokens_of(want)
    for name, outputs in want.items():
        for kind in ("logprobs", "prompt_logprobs"):
            scores, expected = (
                [score for each in found for score in getattr(each, kind) or ()]
                for found in (got[name], outputs)
            )
            assert [(s.token, s.rank) for s in scores] == [(s.token, s.rank) for s in expected]
            assert [[t for t, _ in s.top] for s in scores] == [
                [t for t, _ in s.top] for s in expected
            ]
            for score, other in zip(scores, expected, strict=True):
                assert score.logprob == pytest.approx(other.logprob, abs=1e-4)


class Capturing(Counting):
    """Captures a graph that was left for later before some of the steps."""

    num_captured = 0

    def submit(self, plan: StepPlan) -> Any:
        self.num_captured += sum(self.executors.values()) == 9 and self._runner.capture_next()
        return super().submit(plan)


@inside
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["greedy", "deterministic beside others"])
def test_graphs_that_are_captured_later_change_no_token(
    name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start only the largest graph is captured; the others follow between steps."""
    monkeypatch.setattr(graphs, "_spread", lambda sizes: sizes[-1:])
    monkeypatch.setattr(graphs, "_PATIENCE", 3)
    params = [replace(each, max_tokens=3 + 7 * i) for i, each in enumerate(2 * CASES[name])]
    want = tokens_of(generate(Counting(eager_runner()), params, overlap=overlap))
    runner, _ = graph_runner(at_start=graphs.AtStart.SPREAD)
    counting = Capturing(runner)
    assert tokens_of(generate(counting, params, overlap=overlap)) == want
    assert counting.num_captured == 1
    assert counting.executors["decode graph"] > 9
    while runner.capture_next():
        pass
    assert tokens_of(generate(Counting(runner), params, overlap=overlap)) == want


@inside
def test_logits_change_as_the_reference_says() -> None:
    from windlass.kernels.triton.logits import change_logits, count_tokens

    torch.manual_seed(0)
    logits = 3 * torch.randn(7, VOCAB)
    rows, slots = torch.tensor([5, 0, 3, 6]).int(), torch.tensor([2, 0, 3, 1]).int()
    bias, counts = torch.randn(VOCAB), torch.randint(0, 5, (VOCAB,)).int()
    tables = torch.tensor(
        [[0, 0], [bias.data_ptr(), counts.data_ptr()], [bias.data_ptr(), 0], [0, counts.data_ptr()]]
    )
    penalties = torch.tensor([[1.0, 0, 0], [1.3, 0.5, 0.25], [1, 0, 0], [0.8, -1.0, 1.5]])
    masks = torch.randint(-(2**31), 2**31 - 1, (2, 2)).int()
    args = (logits, rows, slots, torch.tensor([1, -1, 0, -1]).int(), tables, penalties, masks)
    want = changed_logits(*args)
    torch.testing.assert_close(change_logits(*args), want)
    before, tokens = counts.clone(), torch.tensor([1, 2, 3, 4]).int()
    count_tokens(tokens, slots, tables)
    before[[3, 4]] += 2
    assert torch.equal(counts, before)


@inside
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_graphs_equal_eager_steps(name: str, overlap: bool) -> None:
    want = generate(Counting(eager_runner()), CASES[name], overlap=False)
    runner, backend = graph_runner()
    counting = Counting(runner)
    same(generate(counting, CASES[name], overlap=overlap), want)
    assert counting.executors["decode graph"] > 10
    if name == "greedy":
        assert counting.executors["mixed graph"] > 2
        assert set(counting.refusals) >= {("decode graph", "not every row decodes one token")}
    assert backend.num_replays == sum(counting.executors.values()) - counting.executors["eager"]


@inside
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_graphs_pool_as_eager_steps(pooling_type: Any, overlap: bool) -> None:
    """The mixed graphs return hidden states of sampled positions; mean pooling reads all."""
    pooling = (None, PoolingParams(pooling_type=pooling_type, use_activation=False))
    want = generate(Counting(eager_runner()), CASES["greedy"], overlap=False, pooling=pooling)
    runner, _ = graph_runner()
    counting = Counting(runner)
    got = generate(counting, CASES["greedy"], overlap=overlap, pooling=pooling)
    same(got, want)
    for i, outputs in enumerate(want.values()):
        assert (outputs[-1].pooled is not None) == bool(i % 2)
        assert got[str(i)][-1].pooled == outputs[-1].pooled
    refused = ("mixed graph", "all hidden states are read") in counting.refusals
    assert refused == (pooling_type == "mean")
    assert counting.executors["mixed graph"] > 2 or pooling_type == "mean"


@inside
@pytest.mark.parametrize("overlap", [True, False])
def test_graphs_use_the_tables_of_all_groups(overlap: bool) -> None:
    want = generate(Counting(eager_runner()), CASES["greedy"], overlap=False)
    runner, _ = graph_runner(num_groups=3)
    counting = Counting(runner)
    same(generate(counting, CASES["greedy"], overlap=overlap, num_groups=3), want)
    assert counting.executors["decode graph"] > 10
    assert ("decode graph", "a row has several new blocks") not in counting.refusals


@inside
def test_long_contexts_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.runner.cuda.decode.LONG_CONTEXT", 20)
    network = ToyNetwork()
    want = generate(Counting(eager_runner()), CASES["greedy"], overlap=False)
    runner, _ = graph_runner(network=network)
    num_captured = network.long_contexts[True]
    counting = Counting(runner)
    same(generate(counting, CASES["greedy"], overlap=True), want)
    # Three graphs (1, 2 and 4 rows) were captured at the start; replays took both kinds.
    assert num_captured == 3
    assert all(network.long_contexts[is_long] > 10 for is_long in (False, True))


@inside
@pytest.mark.parametrize("name", ["greedy", "deterministic beside others", "logprobs", "grammar"])
def test_stages_equal_eager_steps(name: str) -> None:
    want = generate(Counting(eager_runner()), CASES[name], overlap=False)
    queues = [SimpleQueue[Tensor]() for _ in range(2)]
    stages = [
        graph_runner(
            network=network,
            pipeline=Pipeline(
                Line(rank, queues),  # type: ignore[arg-type]
                hidden_size=1,
                dtype=torch.int64,
                device=CPU,
            ),
        )
        for rank, network in enumerate((FirstStage(), LastStage()))
    ]
    counting = Counting(InTurn([runner for runner, _ in stages]))  # type: ignore[arg-type]
    found = generate(counting, CASES[name], overlap=False, num_stages=2)
    same(found, want)
    assert counting.executors["decode graph"] > 10
    assert [backend.num_replays > 10 for _, backend in stages] == [True, True]
    if name == "logprobs":  # the last stage computes prompt logprobs eagerly, the first does not
        assert stages[0][1].num_replays > stages[1][1].num_replays


@inside
@pytest.mark.parametrize("name", ["greedy", "logprobs", "grammar", "reasoning"])
def test_drafting_steps_equal_eager_steps(name: str) -> None:
    want = generate(Counting(eager_runner()), CASES[name], overlap=False, prompts=5)
    runner, _ = graph_runner(max_draft_tokens=3)
    runner.attach(Oracle(runner._parts.network))
    counting = Counting(runner, draft_length=3)
    same(generate(counting, CASES[name], overlap=False, prompts=5), want)
    assert counting.executors["verification graph"] > 3
    if name == "greedy":
        assert counting.executors["mixed graph"] > 0
        assert counting.num_prelaunched > 3


@inside
def test_graphs_are_freed_with_the_last_reference_to_their_runner() -> None:
    """The memory that the start measures next must not hold the graphs of the runner that measured."""
    runner, _ = graph_runner(max_draft_tokens=3)
    runner.attach(Oracle(runner._parts.network))
    gc.disable()
    try:
        found = [ref(each._graphs) for each in runner.executors if hasattr(each, "_graphs")]
        assert len(found) == 3
        del runner
        assert [each() for each in found] == [None] * 3
    finally:
        gc.enable()


@inside
def test_executors_name_all_their_buffers() -> None:
    """Except for the network's, the cache's, and the outputs of graphs, which lie in the graphs' pool."""
    runner, _ = graph_runner(max_draft_tokens=3)
    parts: Any = runner._parts
    owners = [parts.slots, parts.sampling, *runner.executors]
    named = {tensor.data_ptr() for owner in owners for _, tensor in owner.storages()}
    apart = ("._graphs.", ".network.", ".cache.")
    found = {
        path: tensor.untyped_storage().data_ptr()
        for path, tensor in walk(owners)
        if tensor.numel() and not any(name in path for name in apart)
    }
    assert found
    assert not [path for path, address in found.items() if address not in named]
