"""What crosses the line between deciding and computing: plain values, picklable, no torch.

One step is `plan = scheduler.plan(now)`, `result = runner.run(plan)`,
`outputs = scheduler.commit(plan, result, now)`. The same objects serve one process, the ranks of a
tensor-parallel group, and another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple, NewType

from windlass.core.sampling import SamplingParams
from windlass.errors import EngineError, RequestError

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)

FinishReason = Literal["stop", "length", "abort", "error"]


# Runs before all other requests under every policy. Health probes use it; clients cannot send it.
PROBE_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it enters the engine: tokens in, no text."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # requests share cached blocks only under the same salt
    adapter: str = ""


class SlotInit(NamedTuple):
    """What the runner must know of a request once, when it gets a slot (again)."""

    request_id: str
    slot: SlotId
    tokens: list[int]  # all that is known: the prompt, and after a preemption what was generated
    num_prompt: int
    sampling: SamplingParams
    stop_ids: frozenset[int]  # tokens that end it, and must not come before min_tokens
    seed: int  # the request's own, or one drawn for it: noise depends on it and on the position


class Row(NamedTuple):
    """One request's share of a step.

    There are no phases: one token is a decode, 2,000 a chunk of a prompt, 1 + k a verification.

        positions   0 ........ start ........ start + num_tokens
        KV          |  valid  |  this step   |
    """

    request_id: str
    slot: SlotId
    start: int
    num_tokens: int
    tokens: tuple[int, ...]  # empty: one token, the one you sampled last for this slot
    blocks: tuple[BlockId, ...]  # appended to the slot's block table by this plan
    sample: bool  # whether the last position's logits become a token
    num_drafts: int = 0  # how many of `tokens`, at the end, are guesses to verify
    adapter: int = 0  # the slot of its adapter on the device; 0: the base alone


# Of a row: asked of hundreds in every step.
_NUM_TOKENS, _NUM_DRAFTS = (
    itemgetter(Row._fields.index(name)) for name in ("num_tokens", "num_drafts")
)


class StepPlan(NamedTuple):
    """What to compute now. `freed` slots hold nothing any more; `copies` are done before all else."""

    rows: list[Row]
    admitted: list[SlotInit] = []  # noqa: RUF012 - never written to
    freed: list[SlotId] = []  # noqa: RUF012
    copies: list[tuple[BlockId, BlockId]] = []  # noqa: RUF012 - (from, to)
    step: int = 0
    adapters: list[tuple[int, str]] = []  # noqa: RUF012 - (slot, name): to be put there first
    num_pending_admissions: int = 0  # requests that will come beside these rows, as it seems now

    @property
    def num_tokens(self) -> int:
        return sum(map(_NUM_TOKENS, self.rows))

    @property
    def has_drafts(self) -> bool:
        return any(map(_NUM_DRAFTS, self.rows))


class TokenLogprob(NamedTuple):
    """A token's log probability under the model, its rank (1 = likeliest), and the likeliest."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []  # noqa: RUF012


class RowResult(NamedTuple):
    """What came out of a row: no token while a prompt is unfinished, one, or 1 + accepted.

    `target_tokens` is what the model said after the last known token and after each guess, 1 + guesses of
    them; those after a wrong guess are no output, but they may be worth guessing. Empty for rows
    without guesses, and where a position is only sampled when the guess before it was right.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of positions start + 1 and on
    drafts: tuple[int, ...] = ()  # guesses for the next step
    target_tokens: tuple[int, ...] = ()


class StepResult(NamedTuple):
    """Results in the order of the plan's rows."""

    rows: list[RowResult]
    drafting_s: float = 0.0  # spent on guesses for the next step


@dataclass(slots=True)
class Timeline:
    """When what happened to a request, in seconds of the engine's clock, and what it used.

    Metrics, traces and explanations read it here.
    """

    arrived: float = 0.0
    admitted: float | None = None  # the first time it got a slot
    first_token: float | None = None
    last_token: float | None = None  # kept up to date on outputs that carry this
    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_output: int = 0
    num_chunks: int = 0  # steps that computed prompt tokens
    num_preemptions: int = 0
    num_drafted: int = 0  # guesses that were verified
    num_accepted: int = 0  # of these, right


class Output(NamedTuple):
    """What one step gave one request. `finish` set: the last one."""

    request_id: str
    tokens: list[int] = []  # noqa: RUF012
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop token id that ended it, when one did
    error: str | None = None
    timeline: Timeline | None = None  # on the first output, the last one, and after guesses
    param: str | None = None  # of an error: the field of the request that caused it, if one did

    def exception(self) -> EngineError:
        """What to raise for the error that ended this request."""
        message = self.error or "the engine dropped the request."
        return EngineError(message) if self.param is None else RequestError(message, self.param)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """How things stand with adapters."""

    num_resident: int  # on the device
    num_there: int  # in host memory
    num_loaded: int  # names
    num_waiting: int  # requests that wait for theirs to be read, or for a slot
    num_reads: int  # since the engine started


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """Grammars of structured outputs: how many there are, and what became of them."""

    num_waiting: int  # requests whose grammar is being compiled, or waits for memory
    num_grammars: int  # compiled, refused or being compiled
    num_bytes: int  # of compiled ones
    num_checks: int  # compilations in the sandbox since the engine started
    num_refusals: int  # grammars that were wrong or exceeded a limit


@dataclass(frozen=True, slots=True)
class Account:
    """Where an engine's seconds went; the first three add up to all since it was built."""

    prefill_s: float = 0.0  # the prompt tokens' share of the steps
    decode_s: float = 0.0  # the other tokens' share
    idle_s: float = 0.0  # no step, or one for requests that had ended
    saved_s: float = 0.0  # what the cached tokens of ended requests would have taken


@dataclass(slots=True)
class EngineStats:
    """A glance at the engine after a step: how things stand, and counts since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not yet computed, of running and waiting
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0  # in the last step
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    num_prompt_tokens_computed: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0  # rows with guesses
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_saved_tokens: int = 0  # that came without a step of their own
    drafting_s: float = 0.0
    adapters: AdapterStats | None = None
    grammars: GrammarStats | None = None
    account: Account = Account()

    def add(self, num_tokens: list[int], drafting_s: float) -> None:
        """Add what one step gave: tokens of each request."""
        num_generated = sum(num_tokens)
        self.num_generated_tokens += num_generated
        if self.num_drafts:
            self.num_saved_tokens += sum([count - 1 for count in num_tokens if count > 1])
        self.drafting_s += drafting_s

    def count_draft(self, timeline: Timeline, num_drafted: int, num_accepted: int) -> None:
        """Add one row's guesses, here and on its request."""
        timeline.num_drafted += num_drafted
        timeline.num_accepted += num_accepted
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_position = self.accepted_per_position
        per_position += [0] * (num_drafted - len(per_position))
        for at in range(num_accepted):
            per_position[at] += 1
