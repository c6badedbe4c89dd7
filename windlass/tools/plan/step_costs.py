"""Step costs of a model on this machine: measured now, or read from a cache or a file."""

from __future__ import annotations

import hashlib
import json
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
from windlass.errors import ConfigError, UnsupportedError, file_errors
from windlass.layers.linear import Linear
from windlass.measurement_cache import MeasurementCache
from windlass.models.card import open_checkpoint
from windlass.models.network import block_size_of, kv_layout
from windlass.runner.assemble import make_runner
from windlass.runner.device import choose_device, choose_threads, size_cache
from windlass.runner.kv_copies import reserved_bytes
from windlass.runner.load import load_network
from windlass.speculative.measurement_cache import open_measurement_cache
from windlass.tools.common.device import num_weights, traffic_of
from windlass.tools.plan.calibrate import CalibrationLimits, calibrate
from windlass.tools.plan.cost_model import CostModel
from windlass.tools.plan.speed import Factor, measure_machine, save_factor

if TYPE_CHECKING:
    from windlass.runner.load import Loaded

_MAX_AGE_DAYS = 7  # of cached costs
_MIN_ROWS, _MIN_TOKENS = 64, 2048  # measured at least, so that other settings reuse the costs
_MANY_ROWS = 16  # a step that GEMMs bound, not memory reads
_CACHE_KEY = "steps"
_MAX_SPREAD = 0.15  # above it, other work disturbed the two passes
# Packages that compute a step: a changed file in them invalidates cached costs.
_CODE = ("kernels", "layers", "quant", "runner")

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Step costs of a model, and the sizes of its weights and KV cache."""

    costs: CostModel
    device: Literal["cpu", "cuda"]
    kv_dtype: str  # of the KV cache: "float16"
    weight_bytes: int
    rows: int  # the largest decode step that was measured
    tokens: int  # the largest prefill chunk
    date: str
    source: str  # "measured now in 6.2 s"
    spread: float = 0.0  # between two passes over the same steps
    code: str = ""  # hash of the code that computed the steps

    def capacity(self, config: EngineConfig, opened: OpenModel, limits: Limits) -> Capacity:
        """Return the KV cache that an engine with this config would allocate here."""
        size = block_size_of(config.cache.block_size, opened.hparams)
        device = torch.device(self.device)
        layout = kv_layout(opened.hparams, size, getattr(torch, self.kv_dtype))
        is_sized = config.cache.num_blocks or config.cache.kv_cache_memory_bytes
        if not is_sized and device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "the step costs are from a GPU that this machine does not have: set the size of its "
                "KV cache with --num-blocks or --kv-cache-memory-bytes."
            )
        in_flight = 2 * limits.max_num_batched_tokens
        per_request = layout.blocks_for(max_context(config, opened), in_flight)
        max_blocks = limits.max_num_seqs * per_request
        reserved = reserved_bytes(config.cache, layout.block_bytes, device)
        return size_cache(
            config.cache,
            layout,
            device=device,
            share=limits.memory_share,
            wanted=max_blocks,
            reserved=reserved,
        )

    def to_json(self) -> dict[str, Any]:
        names = ("device", "kv_dtype", "weight_bytes", "rows", "tokens", "date", "spread", "code")
        return {"costs": self.costs.to_json(), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_json(cls, found: dict[str, Any], source: str) -> MeasuredSteps:
        """Parse what `to_json` returned; raise KeyError, TypeError or ValueError for other input."""
        device = found["device"]
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device {device!r}")
        if not isinstance(getattr(torch, found["kv_dtype"], None), torch.dtype):
            raise ValueError(f"kv_dtype {found['kv_dtype']!r}")
        return cls(
            costs=CostModel.from_json(found["costs"]),
            device=device,
            kv_dtype=str(found["kv_dtype"]),
            weight_bytes=int(found["weight_bytes"]),
            rows=int(found["rows"]),
            tokens=int(found["tokens"]),
            date=str(date.fromisoformat(found["date"])),
            source=source,
            spread=float(found.get("spread", 0.0)),
            code=str(found.get("code", "")),
        )

    @property
    def warning(self) -> str | None:
        """Say why the costs are unreliable; None if they are not."""
        if self.spread <= _MAX_SPREAD:
            return None
        return (
            f"two passes over the same steps differ by {self.spread:.0%}: other work used this "
            "machine, and the costs may be too high. They are not cached; measure again when the "
            "machine is idle."
        )


def max_context(config: EngineConfig, opened: OpenModel) -> int:
    """Return --max-model-len, or the model's positions."""
    length = config.model.max_model_len
    return opened.hparams.max_positions if length is None or length == AUTO else length


def get_step_costs(
    config: EngineConfig,
    opened: OpenModel,
    path: Path | None = None,
    log: Log = lambda _: None,
    weights: Loaded | None = None,
) -> MeasuredSteps:
    """Return cached costs for this machine, model and settings; else load the model and measure.

    `path`: read the costs from this file, or write them to it if it does not exist.
    """
    choose_threads(config.model)
    if path is not None and path.exists():
        return _read(path)
    where = choose_device(config.model)
    limits = config.limits(where.type)
    rows = max(_MIN_ROWS, limits.max_num_seqs)
    tokens = max(_MIN_TOKENS, limits.max_num_batched_tokens, rows)
    relevant = _relevant_config(config)
    cache = open_measurement_cache(
        relevant, opened.files, hparams=opened.hparams, device=where.device, folder="steps"
    )
    steps = _cached(cache, rows, tokens)
    if steps is None or path is not None:
        steps = steps or _measure(relevant, opened, rows, tokens, log=log, weights=weights)
        if steps.warning is not None:
            log(steps.warning)
        else:
            cache.put(_CACHE_KEY, steps.to_json())
            cache.save()
        if path is not None:
            _write(path, steps)
    return steps


def _relevant_config(config: EngineConfig) -> EngineConfig:
    """Reset the options that do not change step costs, so that they do not split the cache."""
    cache = config.cache
    return replace(
        config,
        model=replace(config.model, max_model_len=None, served_model_name=(), hf_token=None),
        cache=CacheConfig(block_size=cache.block_size, kv_cache_dtype=cache.kv_cache_dtype),
        scheduler=SchedulerConfig(overlap=config.scheduler.overlap),
        speculation=SpecConfig(),
    )


def _cached(cache: MeasurementCache, rows: int, tokens: int) -> MeasuredSteps | None:
    """Read cached costs; None if they are missing, old, damaged or of smaller steps."""
    found = cache.get(_CACHE_KEY)
    if found is None:
        return None
    try:
        steps = MeasuredSteps.from_json(found, f"measured on {found['date']}")
        age = datetime.now(UTC).date() - date.fromisoformat(steps.date)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    fresh = 0 <= age.days < _MAX_AGE_DAYS and steps.code == _code_hash()
    return steps if fresh and steps.rows >= rows and steps.tokens >= tokens else None


def _measure(
    config: EngineConfig,
    opened: OpenModel,
    rows: int,
    tokens: int,
    *,
    log: Log,
    weights: Loaded | None,
) -> MeasuredSteps:
    log(f"measuring the step costs of {opened.files.name}")
    started = time.perf_counter()
    hparams = opened.hparams
    if hparams.recurrent is not None:
        raise UnsupportedError(
            f"{opened.files.name}: steps of {hparams.architecture} cannot be measured: it has recurrent "
            "states, whose costs the model of steps does not know."
        )
    if hparams.mixes_heads:
        raise UnsupportedError(
            f"{opened.files.name}: steps of {hparams.architecture} cannot be measured: its layers have "
            "heads of different sizes, and so several block tables, which the measured steps do not have."
        )
    if weights is None:
        weights = load_network(config, hparams, open_checkpoint(opened.files, config.model))
    limits = CalibrationLimits(
        rows=rows,
        tokens=tokens,
        positions=hparams.max_positions,
        block_size=block_size_of(config.cache.block_size, hparams),
    )
    sized = replace(
        config,
        cache=replace(config.cache, num_blocks=limits.num_blocks),
        scheduler=replace(config.scheduler, max_num_seqs=rows, max_num_batched_tokens=tokens),
    )
    device = choose_device(config.model).type
    made = make_runner(sized, hparams, loaded=weights, limits=sized.limits(device), one_table=True)
    found = calibrate(made.runner, limits, hparams.sliding_windows)
    if found.spread <= _MAX_SPREAD:
        _save_factor(config, opened, weights=weights, costs=found.costs)
    seconds = time.perf_counter() - started
    return MeasuredSteps(
        costs=found.costs,
        device=device,
        kv_dtype=str(made.kv_format.dtype).removeprefix("torch."),
        weight_bytes=weights.weight_bytes,
        rows=rows,
        tokens=tokens,
        date=str(datetime.now(UTC).date()),
        source=f"measured now in {seconds:.1f} s",
        spread=round(found.spread, 3),
        code=_code_hash(),
    )


def _code_hash() -> str:
    """Hash names, sizes and times of the files that compute steps."""
    root = Path(__file__).parents[2]
    files = sorted(path for name in _CODE for path in (root / name).rglob("*") if path.is_file())
    stamps = [
        (str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in files
        if path.suffix != ".pyc"
    ]
    return hashlib.blake2b(repr(stamps).encode(), digest_size=8).hexdigest()


def _save_factor(
    config: EngineConfig, opened: OpenModel, weights: Loaded, costs: CostModel
) -> None:
    """Cache the shares of the machine's limits that this model reaches, for plans of other models.

    Only models with real weights, as stored and with the usual kernels, are representative.
    """
    model = config.model
    if model.load_format == "dummy" or model.quantization or model.plain_kernels:
        return
    device = weights.parts.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layers = [module for module in weights.network.modules() if isinstance(module, Linear)]
    machine = measure_machine(device, dtype)
    reading = traffic_of(weights.network, 0).step_bytes(0, 1) / machine.bandwidth
    computing = machine.gemm_seconds(_MANY_ROWS * num_weights(layers))
    factor = Factor(
        share=round(reading / costs.decode_seconds(1, 1), 4),
        gemm_share=round(computing / costs.decode_seconds(_MANY_ROWS, 1), 4),
        layer_seconds=0.0,
        source=f"as steps of {opened.files.name} did on {datetime.now(UTC).date()}",
    )
    save_factor(device, dtype, factor)


def _read(path: Path) -> MeasuredSteps:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return MeasuredSteps.from_json(found, f"{path}, measured on {found['date']}")
    except OSError as error:
        raise ConfigError(f"--step-costs {path}: {error.strerror or error}.") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--step-costs {path}: holds no step costs ({error!r}). Remove the file; the command "
            "then measures them and writes it."
        ) from error


def _write(path: Path, steps: MeasuredSteps) -> None:
    with file_errors(f"--step-costs {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(steps.to_json(), indent=1) + "\n", encoding="utf-8")
