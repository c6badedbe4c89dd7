"""Degradation: which model of --fallback answers a request that the server's own cannot answer in time.

Pure decisions over predicted waits and errors. generation.py tries the steps, services.py holds
their engines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from windlass.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    RanTwice,
    RequestError,
    WorkerDied,
)
from windlass.serve.problems import Draining, RateLimited, Sleeping

# auto: a long wait is enough; none: never. Without a mode: if the answer would be late, or an error.
FallbackMode = Literal["auto", "none"]
FALLBACK_MODES: dict[str, FallbackMode] = {"auto": "auto", "none": "none"}
Reason = Literal["deadline", "wait", "queue_full", "unavailable"]

# A shorter answer lowers the load, and cannot shorten a wait that is much longer than accepted.
_MAX_SHORTER_WAITS = 2.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Whether a model would answer a request now, and how long it would be queued."""

    wait_s: float = 0.0
    is_up: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackStep:
    """One --fallback: another model, a shorter answer, or both."""

    model: str | None = None  # None: the server's own model
    max_tokens: int | None = None
    options: str = ""  # of the model's engine, as name=value,...

    @property
    def text(self) -> str:
        return self.model if self.model is not None else f"max_tokens={self.max_tokens}"


def parse_step(text: str) -> FallbackStep:
    """Parse `MODEL,memory_share=0.2,max_tokens=64` or `max_tokens=64`."""
    model: str | None = None
    max_tokens, options = None, []
    for index, part in enumerate(each.strip() for each in text.split(",")):
        name, equals, value = part.partition("=")
        if index == 0 and not equals:
            model = part
        elif name.replace("-", "_") == "max_tokens":
            max_tokens = int(value) if value.isdecimal() and value.isascii() else 0
            if max_tokens < 1:
                raise ConfigError(f"--fallback {text!r}: max_tokens is a number from 1.")
        else:
            options.append(part)
    if model == "" or (model is None and (max_tokens is None or options)):
        raise ConfigError(
            f"--fallback {text!r}: expected MODEL,option=value,... or max_tokens=N. "
            "Example: small-model,memory_share=0.2."
        )
    return FallbackStep(model=model, max_tokens=max_tokens, options=",".join(options))


def check_memory(shares: Sequence[tuple[str, float]]) -> None:
    """Refuse engines that together plan with more memory than there is."""
    if sum(share for _, share in shares) > 1.0 + 1e-9:
        named = ", ".join(f"{name} {share:g}" for name, share in shares)
        raise ConfigError(
            f"the memory shares of the engines sum up to more than 1: {named}. Lower --memory-share, or "
            "memory_share of a --fallback."
        )


def mode_of(
    tenant: FallbackMode | None, *asked: FallbackMode | None, is_batch: bool
) -> FallbackMode | None:
    """The mode of a request that asks for these: "none" wins.

    A request of a batch can wait: it stays with its model unless it asks itself.
    """
    modes = (*asked, None if is_batch else tenant)
    if "none" in (tenant, *asked):
        return "none"
    if "auto" in modes:
        return "auto"
    return "none" if is_batch else None


def reason_of(error: EngineError) -> Reason | None:
    """Why another model should answer a request that failed with `error`; None: it should not."""
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, Overloaded) and not isinstance(error, RateLimited):
        return "queue_full"
    if isinstance(error, WorkerDied) and not isinstance(error, Draining | Sleeping | RanTwice):
        return "unavailable"
    return None


def first_step(
    steps: Sequence[FallbackStep | None],
    forecasts: Sequence[Forecast],
    *,
    allowed_s: float | None,
    limit_s: float | None,
) -> tuple[int, Reason | None]:
    """The step that a request begins with, and why it is not 0, the server's own model.

    `steps`: None at steps that this request may not use, and at 0. `forecasts`: of each of them.
    `allowed_s`: until its deadline. `limit_s`: of the wait, None: any.
    """
    wait_s = forecasts[0].wait_s
    allowed_s = math.inf if allowed_s is None else allowed_s
    limit_s = math.inf if limit_s is None else limit_s
    reason: Reason
    if not forecasts[0].is_up:
        reason, longest_s = "unavailable", allowed_s
    elif wait_s > allowed_s:
        reason, longest_s = "deadline", allowed_s
    elif wait_s > limit_s:
        reason, longest_s = "wait", wait_s
    else:
        return 0, None
    for index, (step, forecast) in enumerate(zip(steps, forecasts, strict=True)):
        if step is None:
            continue
        if step.model is None:
            if reason == "wait" and wait_s <= _MAX_SHORTER_WAITS * limit_s:
                return index, reason
        elif forecast.is_up and forecast.wait_s < longest_s:
            return index, reason
    return 0, None


def next_steps(steps: Sequence[FallbackStep | None], tried: int) -> list[int]:
    """The steps after one that failed: further models, at last the server's own if it was not tried.

    A shorter answer of an engine that has failed would fail, too.
    """
    later = [
        index
        for index, step in enumerate(steps)
        if index > tried and step is not None and step.model is not None
    ]
    return later if tried == 0 else [*later, 0]


def may_go_on(error: EngineError, step: int) -> bool:
    """Whether the next step is tried after `error` at `step`.

    A model of the chain may refuse a request that the server's own accepts, for example a long prompt.
    """
    return reason_of(error) is not None or (step > 0 and isinstance(error, RequestError))
