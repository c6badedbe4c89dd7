"""The types that scheduler and runner exchange: plain values, picklable, no torch.

One step is `plan = scheduler.plan(now)`, `result = runner.run(plan)`,
`outputs = scheduler.commit(plan, result, now)`. The same objects serve one process, the ranks of a
tensor-parallel group, and another machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple, NewType

from windlass.core.pooling import PoolingParams
from windlass.core.sampling import SamplingParams
from windlass.errors import DeadlineExceeded, EngineError, Overloaded, RequestError

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)

# An entry of a block table behind the window of its group: kernels do not read it.
NO_BLOCK = BlockId(-1)

# "handover": the request has its first token, and another engine generates the others.
FinishReason = Literal["stop", "length", "abort", "error", "deadline", "handover"]


# Runs before all other requests under every policy. Health probes use it; clients cannot send it.
PROBE_PRIORITY = -(2**31)
# Runs after all other requests under every policy. Batches use it; clients cannot send it.
BATCH_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it enters the engine: token ids, no text."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # requests share cached blocks only under the same salt
    adapter: str = ""
    adapter_version: str = ""  # of its weights; an engine with others refuses the request
    # If set, the request returns a vector, and the sampled token is not used.
    pooling: PoolingParams | None = None
    prediction: tuple[int, ...] = ()  # the output that the client expects, as draft tokens
    tenant: str = ""  # requests of one tenant share its part of the engine
    weight: float = 1.0  # of the tenant: one of weight 2 gets twice the tokens of one of weight 1
    deadline: float | None = None  # engine clock: the request ends then at the latest
    hand_over: bool = False  # it ends after its first token, and its blocks go to another engine
    generated: tuple[
        int, ...
    ] = ()  # output tokens of another engine: the request goes on after them
    fingerprint: bytes = b""  # of its content, if several models may answer it


class SlotInit(NamedTuple):
    """Initialises a runner slot when a request is admitted, also again after a preemption."""

    request_id: str
    slot: SlotId
    tokens: list[int]  # the prompt and, after a preemption, the generated tokens
    num_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int]  # tokens that finish the request, masked before min_tokens
    seed: int  # sampling noise depends on the seed and the position alone
    grammar: str = ""  # the checked grammar of structured outputs, in llguidance's format
    pooling: PoolingParams | None = None

    @classmethod
    def greedy(cls, slot: SlotId, tokens: list[int], num_prompt: int) -> SlotInit:
        """A slot without a request, for steps that are measured or whose logits are read."""
        return cls(
            request_id="",
            slot=slot,
            tokens=tokens,
            num_prompt=num_prompt,
            sampling=SamplingParams(temperature=0.0),
            stop_ids=frozenset(),
            seed=0,
        )


class Row(NamedTuple):
    """One request's part of a step.

    There are no phases: 1 token is a decode, 2,000 a prefill chunk, 1 + k a verification.

        positions   0 ........ start ........ start + num_tokens
        KV          |  valid  |  this step   |
    """

    request_id: str
    slot: SlotId
    start: int
    num_tokens: int
    tokens: tuple[int, ...]  # empty: the token that the runner sampled last for this slot
    # Appended to the slot's block tables: as many for each group of the layout, one group after the
    # other. NO_BLOCK: in a cached prefix, behind the window.
    blocks: tuple[BlockId, ...]
    sample: bool  # whether to sample from the last position's logits
    num_drafts: int = 0  # the last `num_drafts` of `tokens` are draft tokens to verify
    adapter: int = 0  # device slot of the LoRA adapter; 0: none

    @classmethod
    def unowned(
        cls, slot: SlotId, tokens: tuple[int, ...], *, start: int = 0, blocks: Iterable[int] = ()
    ) -> Row:
        """A row without a request, which samples: for measurements and warm-up."""
        return cls(
            request_id="",
            slot=slot,
            start=start,
            num_tokens=len(tokens),
            tokens=tokens,
            blocks=tuple(map(BlockId, blocks)),
            sample=True,
        )


# Read for hundreds of rows in every step.
_NUM_TOKENS, _NUM_DRAFTS = (
    itemgetter(Row._fields.index(name)) for name in ("num_tokens", "num_drafts")
)


class StepOptions(NamedTuple):
    """What a step computes beside its rows."""

    draft_length: int = 0  # draft tokens to make for each sampled row, for the next step
    needs_all_hidden: bool = False  # the hidden states of all positions are read, not only sampled
    no_draft: tuple[SlotId, ...] = ()  # slots for which a draft model makes no draft tokens
    report_backlog: bool = False  # results carry the backlog of a draft model also without drafting
    # The next plan needs this step's result: its drafts, or how many draft tokens were accepted.
    next_plan_waits: bool = False


NO_OPTIONS = StepOptions()


class StepPlan(NamedTuple):
    """The work of one step. The runner does `saves` first, then `copies`; `freed` slots are empty.

    A plan may have saves or loads, but no rows.
    """

    rows: list[Row]
    admitted: list[SlotInit] = []  # noqa: RUF012 - never written to
    freed: list[SlotId] = []  # noqa: RUF012
    copies: list[tuple[BlockId, BlockId]] = []  # noqa: RUF012 - (from, to)
    step: int = 0
    adapters: list[tuple[int, str]] = []  # noqa: RUF012 - (slot, name): load before the step
    options: StepOptions = NO_OPTIONS
    # Blocks to store in KV tiers under their key, before anything of this plan overwrites them.
    saves: list[tuple[BlockId, bytes]] = []  # noqa: RUF012
    # Records to load into blocks while this step and later ones run; no row uses the blocks.
    loads: list[tuple[bytes, BlockId]] = []  # noqa: RUF012

    @property
    def num_tokens(self) -> int:
        return sum(map(_NUM_TOKENS, self.rows))

    @property
    def has_drafts(self) -> bool:
        return any(map(_NUM_DRAFTS, self.rows))


class TokenLogprob(NamedTuple):
    """A token's log probability, its rank (1 = most likely), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []  # noqa: RUF012


class Draft(NamedTuple):
    """Draft tokens for the positions after the last known token, in order.

    `kind` is the proposer's own confidence class: acceptance is counted per kind.
    """

    tokens: tuple[int, ...]
    kind: int = 0


class RowResult(NamedTuple):
    """The result of a row: no token within a prompt, else 1 + the number of accepted draft tokens.

    `target_tokens` are the target model's samples after the last known token and after each draft
    token: 1 + num_drafts of them. Those after a rejected draft token are not output, but proposers
    may learn from them. Empty for rows without draft tokens, and where a position is sampled only
    when the draft token before it was accepted.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # from position start + 1 on
    drafts: tuple[int, ...] = ()  # draft tokens for the next step, as the proposer made them
    target_tokens: tuple[int, ...] = ()
    draft_kind: int = 0
    backlog: int | None = (
        None  # known tokens, without the last, that a draft model has not computed
    )
    pooled: bytes | None = None  # the vector of a pooling request, as float32


class GrammarFailure(NamedTuple):
    """A request whose grammar failed in a step, and must end."""

    request_id: str
    reason: str
    too_slow: bool  # it exceeded its limit of CPU time


class StepResult(NamedTuple):
    """Results in the order of the plan's rows."""

    rows: list[RowResult]
    drafting_s: float = 0.0  # seconds spent on drafting after the step
    num_caught_up: int = 0  # backlog tokens that a draft model computed in that time
    prelaunched: bool = False  # a step that verifies all drafts already runs
    grammar_failures: tuple[GrammarFailure, ...] = ()
    executor: str = ""  # the part of the runner that computed the step
    refusals: tuple[tuple[str, str], ...] = ()  # executors asked before it, and why they refused


@dataclass(slots=True)
class Timeline:
    """Timestamps (engine clock, seconds) and counters of one request.

    Metrics, traces and `explain` read them here.
    """

    arrived: float = 0.0
    admitted: float | None = None  # first admission
    first_token: float | None = None
    last_token: float | None = None  # valid on outputs that carry a timeline
    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_loaded: int = 0  # of `num_cached`: loaded from a KV tier
    num_output: int = 0
    num_chunks: int = 0  # steps that computed prompt tokens
    num_preemptions: int = 0
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # draft tokens that were accepted


class Output(NamedTuple):
    """The output of one request in one step. `finish` is set on the last one."""

    request_id: str
    tokens: list[int] = []  # noqa: RUF012
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop token id that finished it, if any
    error: str | None = None
    timeline: Timeline | None = None  # on the first and last output, and after a verification
    param: str | None = None  # on errors: the request field that caused it, if any
    pooled: bytes | None = None  # the vector of a pooling request, as float32
    retry_after_s: float | None = None  # on errors of a busy machine

    def exception(self) -> EngineError:
        """Return the exception for the error that ended this request."""
        message = self.error or "the engine dropped the request."
        if self.finish == "deadline":
            return DeadlineExceeded(message)
        if self.retry_after_s is not None:
            return Overloaded(message, self.retry_after_s)
        return EngineError(message) if self.param is None else RequestError(message, self.param)


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """The size of a LoRA adapter, on one rank."""

    rank: int  # the largest of its modules
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """State of the LoRA adapters."""

    num_resident: int  # on the device
    num_in_memory: int  # in host memory
    num_loaded: int  # names
    num_waiting: int  # requests that wait for an adapter to load or for a slot
    num_reads: int  # loads since the engine started
    num_slots: int = 0  # on the device
    running: tuple[str, ...] = ()  # names of adapters with running requests
    waiting: tuple[str, ...] = ()  # names of adapters with queued requests


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Grammars of structured outputs: how many there are, and what became of them."""

    num_waiting: int  # requests whose grammar is being compiled, or waits for memory
    num_grammars: int  # compiled, refused or being compiled
    num_bytes: int  # of compiled ones
    num_checks: int  # compilations in the sandbox since the engine started
    num_refusals: int  # grammars that were wrong or exceeded a limit


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The blocks of a named prefix; with `num_missing`, nothing is pinned yet."""

    num_tokens: int = 0
    num_blocks: int = 0
    num_missing: int = 0  # tokens to compute first


@dataclass(frozen=True, slots=True)
class Account:
    """The engine's time by use. The first three fields add up to its uptime."""

    prefill_s: float = 0.0  # step time of prompt tokens
    decode_s: float = 0.0  # step time of generated tokens
    idle_s: float = 0.0  # no step, or steps for requests that had finished
    saved_s: float = 0.0  # estimated time to compute the cached tokens of finished requests


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """The most tokens over the mean, by layer, since the start; 1 is balanced."""

    expert_imbalance: dict[int, float] = field(default_factory=dict)  # of the experts
    rank_imbalance: dict[int, float] = field(
        default_factory=dict
    )  # of ranks with their own experts


@dataclass(frozen=True, slots=True)
class SloStats:
    """The limits that the SLO controller sets now, and how often it has changed them."""

    ttft_s: float | None  # the target
    num_prompt_tokens: int  # per step
    num_running: int
    draft_length: int | None  # None: no limit
    prompt_tokens_per_s: float  # expected; 0: not known yet
    is_possible: bool  # whether the TPOT target can be met
    changes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One KV tier: its content now, and counters since the engine started; of rank 0, if several."""

    name: str  # "host", "disk", "peer"
    num_records: int = 0
    num_bytes: int = 0
    max_bytes: int = 0
    num_saves: int = 0  # records that were stored
    num_loads: int = 0  # records that were loaded into blocks of the device
    num_failures: int = 0  # loads that failed: their tokens were computed
    num_refused: int = 0  # records that were not stored: no room, a full queue or an error
    num_corrupt: int = 0
    num_evictions: int = 0
    num_hit_tokens: int = 0  # prompt tokens of requests whose blocks were loaded
    record_s: float = 0.0  # measured seconds to load one record


@dataclass(slots=True)
class EngineStats:
    """A snapshot of the engine after a step: current state, and counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    tenant_fairness: float = 1.0  # Jain's index of the tenants' recent service by weight
    num_waiting_tokens: int = 0  # uncomputed prompt tokens of running and queued requests
    waiting_by_reason: dict[str, int] = field(default_factory=dict)  # queued requests by blocker
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0  # findable, and not used
    num_pinned_blocks: int = 0  # of named prefixes
    num_steps: int = 0
    num_step_tokens: int = 0  # of the last step
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    num_prompt_tokens_computed: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0  # rows with draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_saved_tokens: int = 0  # generated without a step of their own
    drafting_s: float = 0.0
    executors: dict[str, int] = field(default_factory=dict)  # steps by the executor that took them
    # Steps by executor and the reason why it refused them.
    refusals: dict[str, dict[str, int]] = field(default_factory=dict)
    adapters: AdapterStats | None = None
    grammars: GrammarStats | None = None
    experts: ExpertStats | None = None  # None: the load is not counted
    account: Account = Account()
    # Requests that ended at their deadline, by when: predicted, queued, prefill, decode.
    deadlines: dict[str, int] = field(default_factory=dict)
    slo: SloStats | None = None  # None: no targets are set
    tiers: tuple[TierStats, ...] = ()  # KV tiers below the device, the fastest first
    # Prefixes found in a tier, by what was decided and why; see core/tiers.py.
    tier_decisions: dict[str, int] = field(default_factory=dict)

    def add(self, num_tokens: list[int], drafting_s: float) -> None:
        """Add the results of one step: the number of tokens per request."""
        num_generated = sum(num_tokens)
        self.num_generated_tokens += num_generated
        if self.num_drafts:
            self.num_saved_tokens += sum([count - 1 for count in num_tokens if count > 1])
        self.drafting_s += drafting_s

    def count_executor(self, result: StepResult) -> None:
        """Count which executor computed a step, and why those asked before it refused."""
        if result.executor:
            self.executors[result.executor] = self.executors.get(result.executor, 0) + 1
        for name, reason in result.refusals:
            reasons = self.refusals.setdefault(name, {})
            reasons[reason] = reasons.get(reason, 0) + 1

    def count_draft(self, timeline: Timeline, num_drafted: int, num_accepted: int) -> None:
        """Count one row's draft tokens, here and on its request."""
        timeline.num_drafted += num_drafted
        timeline.num_accepted += num_accepted
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_position = self.accepted_per_position
        per_position += [0] * (num_drafted - len(per_position))
        for at in range(num_accepted):
            per_position[at] += 1
