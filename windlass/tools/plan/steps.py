"""What steps of a model cost on this machine: measured now, or some days ago and kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from windlass.build import OpenModel
from windlass.config import AUTO, CacheConfig, EngineConfig, Limits, SchedulerConfig, SpecConfig
from windlass.core.card import Capacity
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.models.card import open_checkpoint
from windlass.runner.assemble import load_network, make_runner
from windlass.runner.device import choose_device, choose_threads, size_cache
from windlass.speculative.notes import Notes, notes_for
from windlass.tools.common.device import traffic_of
from windlass.tools.plan import speed
from windlass.tools.plan.calibrate import Room, calibrate
from windlass.tools.plan.costs import CostModel

if TYPE_CHECKING:
    from windlass.runner.assemble import Loaded

_KEPT_DAYS = 7
_ROWS, _TOKENS = 64, 2048  # measured at least, so that other settings need no new measurement
_MANY_ROWS = 16  # whose products, not their reading, take the time
_NAME = "steps"
_DISTURBED = 0.15  # two passes that are further apart tell of something else that used the machine
# What computes a step: costs that were measured before one of these files changed are not taken.
_CODE = ("kernels", "layers", "quant", "runner")

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Steps:
    """The costs of a model's steps, and what its cache takes."""

    costs: CostModel
    device: Literal["cpu", "cuda"]
    token_bytes: int
    weight_bytes: int
    rows: int  # as far as it was measured
    tokens: int
    date: str
    source: str  # "measured now in 6.2 s"
    spread: float = 0.0  # how far two passes over the same steps were apart
    code: str = ""  # what computed them

    def capacity(self, config: EngineConfig, opened: OpenModel, limits: Limits) -> Capacity:
        """The cache that an engine of this config would make here."""
        size, device = config.cache.block_size, torch.device(self.device)
        is_sized = config.cache.num_blocks or config.cache.kv_cache_memory_bytes
        if not is_sized and device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "the costs are those of a GPU that is not here: say how large its cache is, with "
                "--num-blocks or --kv-cache-memory-bytes."
            )
        wanted = limits.max_num_seqs * -(-context_of(config, opened) // size)
        return size_cache(
            config.cache, size * self.token_bytes, device, limits.memory_share, wanted
        )

    def to_json(self) -> dict[str, Any]:
        names = (
            "device",
            "token_bytes",
            "weight_bytes",
            "rows",
            "tokens",
            "date",
            "spread",
            "code",
        )
        return {"costs": self.costs.to_json(), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_json(cls, found: dict[str, Any], source: str) -> Steps:
        """What `to_json` gave; anything else raises KeyError, TypeError or ValueError."""
        names = ("token_bytes", "weight_bytes", "rows", "tokens")
        numbers: dict[str, Any] = {name: int(found[name]) for name in names}
        day, device = str(date.fromisoformat(found["date"])), found["device"]
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device {device!r}")
        costs = CostModel.from_json(found["costs"])
        spread, code = float(found.get("spread", 0.0)), str(found.get("code", ""))
        return cls(costs, device, **numbers, date=day, source=source, spread=spread, code=code)

    @property
    def warning(self) -> str | None:
        """Why they are not to be trusted."""
        if self.spread <= _DISTURBED:
            return None
        return (
            f"two passes over the same steps were {self.spread:.0%} apart: something else used this "
            "machine, so that the costs may be too high. They are not kept; measure again when it "
            "is quiet."
        )


def context_of(config: EngineConfig, opened: OpenModel) -> int:
    wish = config.model.max_model_len
    return opened.hparams.max_positions if wish is None or wish == AUTO else wish


def find_steps(
    config: EngineConfig,
    opened: OpenModel,
    path: Path | None = None,
    log: Log = lambda _: None,
    weights: Loaded | None = None,
    most: tuple[int, int] = (_ROWS, _TOKENS),
) -> Steps:
    """Take what was measured for this machine, model and settings; else load it and measure.

    `path`: a file to take it from, or to write it to where there is none. `most`: rows and tokens
    of the largest step that is asked about.
    """
    choose_threads(config.model)
    if path is not None and path.exists():
        return _read(path)
    where = choose_device(config.model)
    limits = config.limits(where.type)
    rows = max(_ROWS, limits.max_num_seqs, most[0])
    tokens = max(_TOKENS, limits.max_num_batched_tokens, most[1], rows)
    bare = _bare(config)
    notes = notes_for(bare, opened.files, opened.hparams, where.device, "steps")
    kept = _kept(notes, rows, tokens)
    if kept is None or path is not None:
        kept = kept or _measured(bare, opened, rows, tokens, log, weights)
        if kept.warning is not None:
            log(kept.warning)
        else:
            notes.note(_NAME, kept.to_json())
            notes.save()
        if path is not None:
            _write(path, kept)
    return kept


def _bare(config: EngineConfig) -> EngineConfig:
    """What the costs depend on; the rest decides only which steps there are."""
    cache = config.cache
    return replace(
        config,
        model=replace(config.model, max_model_len=None, served_model_name=None, hf_token=None),
        cache=CacheConfig(block_size=cache.block_size, kv_cache_dtype=cache.kv_cache_dtype),
        scheduler=SchedulerConfig(overlap=config.scheduler.overlap),
        speculation=SpecConfig(),
    )


def _kept(notes: Notes, rows: int, tokens: int) -> Steps | None:
    """What was measured before; None when there is nothing, or it is old, damaged or too small."""
    found = notes.of(_NAME)
    if found is None:
        return None
    try:
        steps = Steps.from_json(found, f"measured on {found['date']}")
        age = datetime.now(UTC).date() - date.fromisoformat(steps.date)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    fresh = 0 <= age.days < _KEPT_DAYS and steps.code == _code()
    return steps if fresh and steps.rows >= rows and steps.tokens >= tokens else None


def _measured(
    config: EngineConfig,
    opened: OpenModel,
    rows: int,
    tokens: int,
    log: Log,
    weights: Loaded | None,
) -> Steps:
    log(f"measuring what steps of {opened.files.name} cost here")
    started = time.perf_counter()
    hparams = opened.hparams
    if weights is None:
        weights = load_network(config, hparams, open_checkpoint(opened.files, config.model))
    room = Room.wanted(rows, tokens, hparams.max_positions, config.cache.block_size)
    sized = replace(
        config,
        cache=replace(config.cache, num_blocks=room.num_blocks),
        scheduler=replace(config.scheduler, max_num_seqs=rows, max_num_batched_tokens=tokens),
    )
    device = choose_device(config.model).type
    made = make_runner(sized, hparams, weights, sized.limits(device))
    found = calibrate(made.runner, room, hparams.sliding_windows)
    if found.spread <= _DISTURBED:
        _keep_factor(config, opened, weights, found.costs)
    taken = time.perf_counter() - started
    return Steps(
        found.costs,
        device,
        made.kv_format.token_bytes,
        weights.weight_bytes,
        rows,
        tokens,
        str(datetime.now(UTC).date()),
        f"measured now in {taken:.1f} s",
        round(found.spread, 3),
        _code(),
    )


def _code() -> str:
    """Differs when a file that computes steps does."""
    root = Path(__file__).parents[2]
    files = sorted(path for room in _CODE for path in (root / room).rglob("*") if path.is_file())
    stamps = [
        (str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
        if path.suffix != ".pyc"
    ]
    return hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()


def _keep_factor(
    config: EngineConfig, opened: OpenModel, weights: Loaded, costs: CostModel
) -> None:
    """What the model reaches of the machine, for plans of others; of real weights as stored."""
    model = config.model
    if model.load_format == "dummy" or model.quantization or model.plain_kernels:
        return
    device = weights.parts.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layers = [module for module in weights.network.modules() if isinstance(module, Linear)]
    num_weights = sum(math.prod(item.shape) for layer in layers for item in layer.gemm)
    num_weights += sum(layer.weight.numel() for layer in layers if layer.weight is not None)
    num_bytes = traffic_of(weights.network, 0).weight_bytes
    one, many = (
        speed.Step(num_bytes, rows * num_weights, costs.decode_seconds(rows, 1))
        for rows in (1, _MANY_ROWS)
    )
    source = f"as steps of {opened.files.name} did on {datetime.now(UTC).date()}"
    machine = speed.measure(device, dtype)
    speed.keep_factor(device, dtype, machine.reached(one, many, source))


def _read(path: Path) -> Steps:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Steps.from_json(found, f"{path}, measured on {found['date']}")
    except OSError as error:
        raise ConfigError(f"--step-costs {path}: {error.strerror or error}.") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--step-costs {path}: holds no costs of steps ({error!r}). Remove it, and they are "
            "measured and written there."
        ) from error


def _write(path: Path, steps: Steps) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(steps.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--step-costs {path}: {error.strerror or error}.") from error
