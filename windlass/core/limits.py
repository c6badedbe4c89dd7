"""The scheduler's limits, and whether a request can ever fit them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windlass.core.kv_layout import KVLayout, tokens_in_flight
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import CapacityError, ConfigError, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTimes:
    """Targets of latency in seconds; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def of(cls, *, ttft_ms: float | None, tpot_ms: float | None) -> SloTimes:
        return cls(
            ttft_s=None if ttft_ms is None else ttft_ms / 1000,
            tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCaps:
    """Limits of a running engine, at most those it was built with; None: as it was built."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_draft_tokens: int | None = None  # per request and step; 0: no drafts
    slo: SloTimes | None = None


def check_whole_prompts_fit(max_num_batched_tokens: int, max_model_len: int) -> None:
    """Raise ConfigError if a prompt that is not split into chunks may be longer than a step."""
    if max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a whole prompt must fit one step: raise "
            f"--max-num-batched-tokens ({max_num_batched_tokens}) to --max-model-len "
            f"({max_model_len}), lower the latter, or drop --no-enable-chunked-prefill."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Fixed when the engine is built."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    layout: KVLayout
    num_blocks: int
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    why_not_batch_invariant: str | None = None  # why no request can be deterministic
    lookahead: int = 0  # tokens ahead of a running request that get spare blocks
    lookahead_after_drafts: int = 0  # the same, counted from a row's last draft token
    drop_drafts_below: int = 0  # mixed steps of at most this many tokens verify no draft tokens
    num_stages: int = 1  # pipeline stages, which is the max number of plans in flight

    def __post_init__(self) -> None:
        if not self.chunked_prefill:
            check_whole_prompts_fit(self.max_num_batched_tokens, self.max_model_len)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def max_pending(self) -> int:
        """Max samples in flight of a request that gets another row. Only the last pipeline stage has the
        sampled token; the first stage waits for the commit.
        """
        return 1 if self.num_stages == 1 else 0

    def max_samples(self, num_requests: int, num_pending: int, num_plans: int) -> int:
        """Max rows of the next plan that sample, so that requests are spread over all stages.

        `num_plans` plans with `num_pending` samples are in flight.
        """
        if self.num_stages == 1:
            return self.max_num_seqs
        num_requests = min(num_requests, self.max_num_seqs)
        num_idle, num_idle_stages = num_requests - num_pending, self.num_stages - num_plans
        share = -(-num_requests // self.num_stages)
        return max(1, min(share, -(-num_idle // max(1, num_idle_stages))))

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        in_flight = tokens_in_flight(self.max_num_batched_tokens, self.num_stages)
        return self.layout.max_tokens(self.num_blocks, in_flight, self.max_model_len)

    def _bound(self) -> tuple[int, str, str]:
        """The max tokens of a request, what bounds them, and how to raise the bound."""
        longest = self.longest
        if longest == self.max_model_len:
            return longest, "the model's context", ""
        advice = ", or give the cache more memory (--kv-cache-memory-bytes, --memory-share)"
        return longest, "the whole KV cache", advice

    def fit_pooled(self, num_prompt: int) -> None:
        """Raise if a prompt to pool, which needs no room for an answer, can never fit."""
        longest, what, advice = self._bound()
        if num_prompt > longest:
            raise CapacityError(
                f"the input has {num_prompt} tokens, and {what} holds {longest}. Shorten it, or send "
                f"truncate_prompt_tokens: {longest}{advice}.",
                "input",
            )

    def fit(self, num_prompt: int, max_tokens: int | None) -> int:
        """Maximum number of tokens to generate. Raises if the request can never fit."""
        longest, what, advice = self._bound()
        if num_prompt >= longest:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens, and {what} holds {longest}, one of which "
                f"the answer needs. Shorten the prompt{advice}.",
                "prompt",
            )
        if max_tokens is not None and num_prompt + max_tokens > longest:
            raise CapacityError(
                f"a prompt of {num_prompt} tokens plus max_tokens={max_tokens} is more than "
                f"{what} holds ({longest}). Request at most {longest - num_prompt}{advice}.",
                "max_tokens",
            )
        return longest - num_prompt if max_tokens is None else max_tokens

    def check(self, sampling: SamplingParams) -> None:
        """Refuse sampling params that this engine does not support."""
        if sampling.deterministic and self.why_not_batch_invariant is not None:
            raise RequestError(
                f"deterministic is not possible with this engine: {self.why_not_batch_invariant}. Leave it "
                "out, or serve the model with 16-bit weights.",
                "deterministic",
            )

    def check_request(self, new: NewRequest) -> int:
        """The most tokens that a new request may sample. Raises if it is malformed or can never fit."""
        if not new.prompt:
            raise RequestError("the prompt is empty: it has no tokens.", "prompt")
        if not 0.0 < new.weight < math.inf:
            raise RequestError(
                f"weight={new.weight} of tenant {new.tenant!r} is not a finite number above 0.",
                "weight",
            )
        self.check(new.sampling)
        # With max_tokens=0 the token after the prompt is sampled and dropped, as that of a pooling request.
        max_tokens = 1
        if new.pooling is not None:
            self.fit_pooled(len(new.prompt))
        else:
            max_tokens = max(1, self.fit(len(new.prompt), new.sampling.max_tokens))
        if new.generated and len(new.generated) >= max_tokens:
            raise RequestError(
                f"the request has {len(new.generated)} of at most {max_tokens} output tokens already.",
                "max_tokens",
            )
        return max_tokens

    def chunk(self, num_left: int, budget: int) -> int:
        """Number of a request's `num_left` tokens for a step with `budget` left."""
        if not self.chunked_prefill:
            return num_left if num_left <= budget else 0
        return min(num_left, self.long_prefill_token_threshold or num_left, budget)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
