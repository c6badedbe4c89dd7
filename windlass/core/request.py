"""A request inside the scheduler: its tokens, its progress and its KV blocks."""

from __future__ import annotations

from windlass.core.blocks import block_hash, root_hash
from windlass.core.sampling import SamplingParams
from windlass.core.tenant_account import TenantAccount
from windlass.core.trace import RequestAccounting
from windlass.core.types import (
    BlockId,
    EngineStats,
    FinishReason,
    NewRequest,
    Row,
    RowResult,
    SlotId,
    SlotInit,
    Timeline,
    TokenLogprob,
)

_NEVER = 2**62


class Request:
    """State of one request. Only the scheduler changes it.

        tokens      : known                     |#############|
        planned     : KV computed or in flight  |###########|      moved by plan
        computed    : KV valid                  |########|         moved by commit
        num_pending : samples in flight                        |?|

    What is left to compute is one subtraction: tokens + pending - planned.
    """

    __slots__ = (
        "_hashes",
        "account",
        "adapter",
        "adapter_slot",
        "arrival",
        "at_longest",
        "cache_salt",
        "computed",
        "deadline",
        "draft_computed",
        "draft_kind",
        "drafts",
        "finish",
        "first_held",
        "fresh",
        "generation",
        "longest",
        "max_tokens",
        "num_charged",
        "num_pending",
        "num_prompt",
        "num_scored",
        "num_sealed",
        "planned",
        "pooling",
        "priority",
        "request_id",
        "room",
        "root",
        "sampling",
        "seal_at",
        "seed",
        "share",
        "slot",
        "stop_ids",
        "tables",
        "timeline",
        "tokens",
        "verifying",
    )

    def __init__(
        self,
        new: NewRequest,
        arrival: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        now: float,
        account: TenantAccount,
        adapter_salt: str = "",
    ) -> None:
        self.request_id = new.request_id
        self.tokens = [*new.prompt, *new.generated]
        self.num_prompt = len(new.prompt)
        self.sampling: SamplingParams = new.sampling
        self.pooling = new.pooling
        self.priority = new.priority
        self.account = account
        self.num_charged = 0  # prompt tokens that the account was charged for
        self.deadline = new.deadline
        self.arrival = arrival
        self.max_tokens = max_tokens
        self.longest = self.num_prompt + max_tokens
        self.at_longest: FinishReason = "length"  # why it ends there
        if new.hand_over and max_tokens > 1:
            self.longest, self.at_longest = self.num_prompt + 1, "handover"
        self.stop_ids = stop_ids
        self.seed = seed
        self.tables: list[list[BlockId]] = []  # blocks in token order, for each group of the layout
        self.first_held: list[int] = []  # per group: blocks before it were freed
        self.room = 0  # tokens that the tables have entries for
        self.slot: SlotId | None = None
        self.adapter = new.adapter
        self.adapter_slot = 0  # device slot of the adapter while the request runs
        self.planned = 0
        self.computed = 0
        self.num_pending = 0
        self.num_sealed = 0
        self.seal_at = _NEVER  # computed tokens at which the next block is full
        self.num_scored = 0  # prompt tokens whose log probabilities were sent
        self.drafts: tuple[int, ...] = ()  # draft tokens to verify in the next row
        self.draft_kind = 0  # of the last draft
        self.draft_computed = 0  # tokens that a draft model has computed, as far as it reported
        self.verifying = False  # draft tokens are in flight, so the next position is unknown
        self.generation = 0  # advanced by each preemption, so that late results are recognised
        self.finish: FinishReason | None = None
        self.timeline = Timeline(arrived=now, num_prompt=self.num_prompt)
        self.share = RequestAccounting()
        self.fresh = True  # no row was planned since its admission
        # Deterministic requests must not reuse blocks computed without batch invariance.
        mode = "fixed" if new.sampling.deterministic else ""
        self.cache_salt = new.cache_salt
        self.root = root_hash(f"{adapter_salt}\0{new.cache_salt}\0{mode}")
        self._hashes: list[bytes] = []

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that no plan has covered yet, including one that is being sampled."""
        return len(self.tokens) + self.num_pending - self.planned

    @property
    def has_grammar(self) -> bool:
        return self.sampling.structured_outputs is not None

    @property
    def may_read_cache(self) -> bool:
        """Whether the prefix cache can be used: only the prompt's last hidden state is read.

        Prompt logprobs and mean pooling read the hidden states of all positions.
        """
        reads_all = self.pooling is not None and self.pooling.reads_all
        return self.sampling.prompt_logprobs is None and not reads_all

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """The hashes of the first `count` full blocks."""
        self._hash_up_to(count, block_size)
        return self._hashes[:count]

    def hash_at(self, index: int, block_size: int) -> bytes:
        self._hash_up_to(index + 1, block_size)
        return self._hashes[index]

    def _hash_up_to(self, count: int, block_size: int) -> None:
        """Hash blocks lazily, each once."""
        hashes = self._hashes
        while len(hashes) < count:
            at = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.root
            hashes.append(block_hash(parent, self.tokens[at : at + block_size]))

    def take(self, tokens: list[int]) -> tuple[int, FinishReason | None, int | None]:
        """Append sampled tokens until one finishes the request: (count, finish reason, stop token)."""
        own = self.tokens
        num_before = len(own)
        longest = self.longest
        for token in tokens:
            own.append(token)
            if token in self.stop_ids and self.num_output > self.sampling.min_tokens:
                return len(own) - num_before, "stop", token
            if len(own) >= longest:
                return len(own) - num_before, self.at_longest, None
        return len(tokens), None, None

    def slot_init(self, grammar: str) -> SlotInit:
        """The message that initialises the request's slot in the runner."""
        assert self.slot is not None
        return SlotInit(
            request_id=self.request_id,
            slot=self.slot,
            tokens=list(self.tokens),
            num_prompt=self.num_prompt,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            seed=self.seed,
            grammar=grammar,
            pooling=self.pooling,
        )

    def settle_drafts(self, row: Row, got: RowResult, stats: EngineStats) -> None:
        """Count the accepted draft tokens and keep the new ones for the next row."""
        if row.num_drafts:
            num_accepted = len(got.tokens) - 1
            stats.count_draft(self.timeline, row.num_drafts, num_accepted)
            self.share.count_drafts(row.num_drafts, num_accepted)
            # Rejected draft tokens need no rollback: their KV is overwritten.
            self.computed -= row.num_drafts - num_accepted
            self.planned = self.computed
            self.verifying = False
        if self.num_pending == 1:  # otherwise an overlapped plan has already passed them
            self.drafts, self.draft_kind = got.drafts, got.draft_kind

    def unreported(self, row: Row, scores: list[TokenLogprob]) -> list[TokenLogprob]:
        """The prompt logprobs that were not sent before a preemption."""
        fresh = scores[max(0, self.num_scored - row.start) :]
        self.num_scored += len(fresh)
        return fresh

    def forget_kv(self) -> None:
        """Reset progress after a preemption. Cached blocks are found again at the next admission."""
        self.tables, self.first_held, self.room = [], [], 0
        self.slot = None
        self.planned = self.computed = self.num_sealed = 0
        self.drafts, self.draft_computed = (), 0
        self.verifying = False
        self.fresh = True
        self.generation += 1
