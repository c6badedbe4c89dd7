"""Sampling parameters of a request: how tokens are chosen, and when generation stops.

Names and defaults follow vLLM. Values are checked once, at construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from windlass.core.reasoning import ReasoningPhase
from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError

MAX_N = 128


def _in_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    bad_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if bad_type or math.isnan(value) or value < low or value > high or (low_open and value == low):
        left = "(" if low_open else "["
        raise RequestError(f"{name} must be in {left}{low:g}, {high:g}], got {value!r}.", name)


def _whole(name: str, value: int | None, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise RequestError(f"{name} must be a whole number >= {low}, got {value!r}.", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Usage: `SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, stop=["\\n"])`.

    `temperature=0` is greedy. `max_tokens=None`: up to the context length; 0: only the prompt is computed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None  # reasoning tokens of a chat before the answer begins
    seed: int | None = None
    deterministic: bool = False  # batch-invariant: the same tokens in any batch, slower
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # number of top alternatives; -1: all
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    # Token sequences that must not be completed; RequestBuilder encodes bad_words into them.
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    # Where the reasoning of a chat ends; text/chat_output.py sets it.
    reasoning: ReasoningPhase | None = None

    def __post_init__(self) -> None:
        self._normalise()
        _whole("n", self.n, 1)
        if self.n > MAX_N:
            raise RequestError(f"n must be at most {MAX_N}, got {self.n}.", "n")
        _in_range("temperature", self.temperature, low=0.0, high=100.0)
        _in_range("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _in_range("min_p", self.min_p, low=0.0, high=1.0)
        _in_range("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _in_range("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _in_range("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True)
        _whole("top_k", self.top_k, -1)
        _whole("max_tokens", self.max_tokens, 0)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("thinking_token_budget", self.thinking_token_budget, 0)
        _whole("seed", self.seed, -(2**63))
        _whole("logprobs", self.logprobs, -1)
        _whole("prompt_logprobs", self.prompt_logprobs, -1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}).",
                "min_tokens",
            )
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token}]", bias, low=-100.0, high=100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty: no token could be chosen. Leave it out to allow all.",
                "allowed_token_ids",
            )
        if any(not text for text in self.stop):
            raise RequestError("stop contains an empty string, which would stop at once.", "stop")
        if any(not text for text in self.bad_words):
            raise RequestError("bad_words contains an empty string.", "bad_words")
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos cannot be set with structured_outputs: its end is the end of the output.",
                "ignore_eos",
            )

    def _normalise(self) -> None:
        """Accept a single string, lists and None, and store tuples."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if isinstance(self.structured_outputs, dict):
            structured = StructuredOutputs.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", structured)
        object.__setattr__(
            self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids or ())
        )
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids)
            )
        bias = self.logit_bias or {}
        try:
            object.__setattr__(self, "logit_bias", {int(t): b for t, b in bias.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {bias!r}.", "logit_bias"
            ) from error

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are modified before sampling."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_token_ids
            or self.min_tokens
            or self.structured_outputs is not None
            or self.reasoning is not None
        )

    @property
    def is_only_tokens(self) -> bool:
        """Whether a completion needs only tokens: no logprobs, and no stop string in its text."""
        return not self.stop and self.logprobs is None and self.prompt_logprobs is None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    def child(self, index: int) -> SamplingParams:
        """The parameters of completion `index` out of `n`: one completion, its own seed."""
        if self.n == 1:
            return self
        made = copy(self)  # not `replace`, which would check long token lists n times
        object.__setattr__(made, "n", 1)
        if self.seed is not None:
            object.__setattr__(made, "seed", _wrapped(self.seed + index))
        return made


def _wrapped(seed: int) -> int:
    """`seed` wrapped to a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(text, str) for text in items):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}.", name)
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    whole = isinstance(value, Sequence) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
    if not whole:
        raise RequestError(f"{name} must be a list of token ids, got {value!r}.", name)
    return tuple(value)  # type: ignore[arg-type]
