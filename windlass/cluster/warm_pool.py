"""The policy of a warm pool: which models stay awake, asleep and ready to wake, or stopped.

Pure decisions over one host or pool of memory: the caller reports demand and times, and `plan` says
which state each model should have. A model that requests wait for is awake first. The memory that is
left goes to sleeping models that are most likely to save a cold start.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from windlass.errors import ConfigError

State = Literal["awake", "asleep", "stopped"]
# cold: files come from the disk; warm: from the page cache; wake_1, wake_2: from a level of sleep.
StartKind = Literal["cold", "warm", "wake_1", "wake_2"]

_KEPT_STARTS = 9  # of each model and kind


class Demand:
    """Requests per second of each model, with exponential decay. Callers pass the time in."""

    def __init__(self, half_life_s: float = 900.0) -> None:
        if half_life_s <= 0.0:
            raise ConfigError(f"the half-life of demand must be above 0 s, got {half_life_s:g}.")
        self._decay = math.log(2) / half_life_s
        self._rates: dict[str, tuple[float, float]] = {}  # model: rate, and its time
        self._last: dict[str, float] = {}

    def add(self, model: str, now: float, num_requests: float = 1.0) -> None:
        """Note requests that have arrived."""
        self._rates[model] = self.rate(model, now) + num_requests * self._decay, now
        self._last[model] = now

    def rate(self, model: str, now: float) -> float:
        rate, at = self._rates.get(model, (0.0, now))
        return rate * math.exp(-self._decay * max(0.0, now - at))

    def idle_s(self, model: str, now: float) -> float:
        """Seconds since the last request; infinite: there was none."""
        return now - self._last.get(model, -math.inf)

    def likelihood(self, model: str, now: float, within_s: float) -> float:
        """The probability of a request `within_s` seconds, if they arrive independently."""
        return -math.expm1(-self.rate(model, now) * within_s)


class StartTimes:
    """The last measured starts of each model, by kind and phase."""

    def __init__(self) -> None:
        self._starts: defaultdict[tuple[str, StartKind], deque[Mapping[str, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT_STARTS)
        )

    def add(self, model: str, kind: StartKind, phases: Mapping[str, float]) -> None:
        """Record the seconds of each phase of one start."""
        self._starts[model, kind].append(dict(phases))

    def seconds(self, model: str, kind: StartKind, default: float) -> float:
        """The median of all phases together; `default`: no such start was measured."""
        starts = self._starts.get((model, kind))
        return median(sum(each.values()) for each in starts) if starts else default

    def phases(self, model: str, kind: StartKind) -> dict[str, float]:
        """The median of each phase, in the order of the last start; {}: none was measured."""
        starts = self._starts.get((model, kind))
        if not starts:
            return {}
        return {name: median(each[name] for each in starts if name in each) for name in starts[-1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """A model that the pool may hold, and its current state."""

    name: str
    state: State
    awake_bytes: int
    asleep_bytes: int
    start_s: float  # until a stopped model answers
    wake_s: float  # until a sleeping one does
    num_pending: int = 0  # requests in flight or held for it
    always_awake: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPoolConfig:
    memory_bytes: int
    idle_s: float = 300.0  # without requests, until a model may go to sleep
    horizon_s: float = 3600.0  # a sleeping model is worth what it saves within this time
    min_saved_s: float = 0.01  # expected, for which a model is kept asleep

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ConfigError(f"a warm pool needs memory_bytes above 0, got {self.memory_bytes}.")


@dataclass(frozen=True, slots=True)
class Decision:
    """The state that a model should have."""

    state: State
    reason: str


def plan(
    models: Mapping[str, PooledModel], demand: Demand, *, config: WarmPoolConfig, now: float
) -> dict[str, Decision]:
    """Decide the state of every model; all together fit into `memory_bytes`.

    Apply `asleep` and `stopped` before `awake`, which needs the memory that they free.
    """
    left = config.memory_bytes
    decisions: dict[str, Decision] = {}

    def keep(model: PooledModel, state: State, reason: str) -> None:
        nonlocal left
        left -= model.awake_bytes if state == "awake" else model.asleep_bytes
        decisions[model.name] = Decision(state, reason)

    for model in sorted(models.values(), key=lambda each: _urgency(each, demand, now)):
        why = _why_awake(model, demand, config=config, now=now)
        if why and model.awake_bytes <= left:
            keep(model, "awake", why)
    worth = {
        each.name: _worth(each, demand, config=config, now=now)
        for each in models.values()
        if each.name not in decisions
    }
    for name in sorted(worth, key=lambda name: (-worth[name] / models[name].asleep_bytes, name)):
        model, saved_s = models[name], worth[name]
        is_needed = bool(_why_awake(model, demand, config=config, now=now))
        if model.state == "stopped":
            why = "it is not loaded; a request starts it"
            decisions[name] = Decision("stopped", _no_room(model, left) if is_needed else why)
        elif model.asleep_bytes > left:
            decisions[name] = Decision("stopped", _no_room(model, left))
        elif saved_s < config.min_saved_s and not is_needed:
            why = f"it would save {saved_s:.2g} s of the next {config.horizon_s:g} s"
            decisions[name] = Decision("stopped", why)
        else:
            why = f"it is expected to save {saved_s:.2g} s of the next {config.horizon_s:g} s"
            keep(model, "asleep", _no_room(model, left) if is_needed else why)
    return decisions


def _urgency(model: PooledModel, demand: Demand, now: float) -> tuple[bool, bool, bool, float, str]:
    """Models that must be awake first, then those with requests, those awake, and by demand."""
    rate = demand.rate(model.name, now)
    is_pending, is_awake = model.num_pending > 0, model.state == "awake"
    return not model.always_awake, not is_pending, not is_awake, -rate, model.name


def _why_awake(model: PooledModel, demand: Demand, *, config: WarmPoolConfig, now: float) -> str:
    """Why a model should be awake; "": nothing speaks for it."""
    if model.always_awake:
        return "it is always awake"
    if model.num_pending:
        return f"{model.num_pending} requests are in flight or wait for it"
    idle_s = demand.idle_s(model.name, now)
    if model.state == "awake" and idle_s < config.idle_s:
        return f"its last request was {idle_s:.0f} s ago"
    return ""


def _worth(model: PooledModel, demand: Demand, *, config: WarmPoolConfig, now: float) -> float:
    """The seconds of waiting that keeping it asleep is expected to save."""
    saved_s = max(0.0, model.start_s - model.wake_s)
    return demand.likelihood(model.name, now, config.horizon_s) * saved_s


def _no_room(model: PooledModel, left: int) -> str:
    return (
        f"{left / 2**30:.2f} GiB are left; it needs {model.asleep_bytes / 2**30:.2f} asleep and "
        f"{model.awake_bytes / 2**30:.2f} awake"
    )
