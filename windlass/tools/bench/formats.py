"""Measures the quality, size and speed of every weight format: one row per format.

Each finished row is saved, and an interrupted run resumes. A format that cannot be built or loaded
becomes a row with the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError
from windlass.layers.linear import Linear
from windlass.models.network import Network
from windlass.tools.bench.checkpoints import (
    FORMATS,
    REFERENCE,
    CheckpointBuilder,
    Format,
    FormatInputs,
    Log,
    find_formats,
)
from windlass.tools.bench.throughput import WindlassEngine, run_draw
from windlass.tools.common.device import release_memory, weight_kernels
from windlass.tools.common.record import Record, saved_rows
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find
from windlass.tools.eval.compare import QualityComparison
from windlass.tools.eval.data import Corpus, read_corpus
from windlass.tools.eval.metrics import Quality
from windlass.tools.eval.windows import Cut

_NOTES = (
    "perplexity, KL and agreement: the format's weights in float32 arithmetic, relative to the "
    "float32 model. served: with this device's kernels, whose own rounding adds to the error. bits: "
    "per weight of the decoder's matrices in memory, including scales; 3-bit codes are stored in "
    "4 bits."
)
_SPEED_NOTE = " tok/s: decode, and relative to the float32 model in alternating runs."
_NUM_BLOCKS = 256  # KV cache blocks, more than the short runs need
_SIZES = Sizes(input_len=32, output_len=32)
_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class FormatsConfig:
    """What to measure, on which text, and where to save it."""

    options: dict[str, Any]
    names: Sequence[str]
    data: str
    cut: Cut
    inputs: FormatInputs
    num_samples: int
    sample_tokens: int
    repeat: int
    speed: bool  # whether to measure speed
    work: Path
    output: Path

    def __post_init__(self) -> None:
        for flag, value in (("--samples", self.num_samples), ("--repeat", self.repeat)):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}.")
        varied = [
            name
            for name in ("dtype", "quantization", "quantize_head", "kv_cache_dtype")
            if name in self.options
        ]
        if varied:
            raise ConfigError(
                f"--{varied[0].replace('_', '-')} is set by the formats themselves. Remove it."
            )
        text, folder = self.inputs.calibration, self.inputs.gguf_dir
        if text is not None and not text.is_file():
            raise ConfigError(f"--calibration {text}: there is no such file.")
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--gguf-dir {folder}: there is no such folder.")

    def settings(self, model_name: str, data_name: str) -> dict[str, Any]:
        """The settings that all rows depend on."""
        text = self.inputs.calibration
        return {
            **self.options,
            "name": model_name,
            "data": data_name,
            **asdict(self.cut),
            "calibration": hashlib.sha256(text.read_bytes()).hexdigest() if text else None,
            "samples": self.num_samples,
            "sample_tokens": self.sample_tokens,
            "repeat": self.repeat,
        }


def measure(config: FormatsConfig, log: Log) -> Record:
    """Measure the formats that the output file does not have, and save after each row."""
    formats = find_formats(config.names, config.inputs, log)
    corpus = read_corpus(config.data)
    bench = _Bench(config, corpus, log)
    settings = json.loads(json.dumps(config.settings(bench.model_name, corpus.name), default=str))
    # Failed formats are measured again.
    before = saved_rows(config.output, "formats", settings)
    rows = {row["format"]: row for row in before if "error" not in row}
    # Quality of all formats first, so that all speeds are measured within minutes of each other.
    steps = {"perplexity": bench.quality} | ({"tok_s_b1": bench.speed} if config.speed else {})
    done = [each for each in formats if rows.get(each.name, {}).keys() >= steps.keys()]
    if done:
        log(f"{config.output} already has {len(done)} of {len(formats)} rows")
    for figure, step in steps.items():
        todo = [each for each in formats if figure not in rows.get(each.name, {})]
        for number, each in enumerate(todo, start=1):
            row = rows.setdefault(each.name, {"format": each.name})
            if "error" in row:
                continue
            try:
                row |= step(each)
            except EngineError as error:
                row["error"] = str(error)
            log(f"{number} of {len(todo)}, {each.name}: {_status(row)}")
            _record(rows, settings).save(config.output)
            release_memory()
    return _record(rows, settings)


def _record(rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> Record:
    ordered = [rows[each.name] for each in FORMATS if each.name in rows]
    failed = [f" {row['format']} failed: {row['error']}" for row in ordered if "error" in row]
    speeds = _SPEED_NOTE if any("tok_s_b1" in row for row in ordered) else " Speeds: not measured."
    return Record(
        name="formats", rows=ordered, notes=_NOTES + speeds + "".join(failed), settings=settings
    )


class _Bench:
    """Measures single formats. Owns the float32 model that the others are compared with."""

    def __init__(self, config: FormatsConfig, corpus: Corpus, log: Log) -> None:
        self._config = config
        self._corpus = corpus
        base = EngineConfig.of(**config.options)
        self._reference = self._engine_config("float32", {})
        self._opened = open_model(base)
        self._checkpoints = CheckpointBuilder(
            base=base,
            opened=self._opened,
            folder=config.work,
            inputs=config.inputs,
            num_samples=config.num_samples,
            sample_tokens=config.sample_tokens,
            log=log,
        )

    @property
    def model_name(self) -> str:
        return self._opened.card.name

    @cached_property
    def _quality(self) -> QualityComparison:
        return QualityComparison(
            reference=self._reference,
            opened=self._opened,
            corpus=self._corpus,
            cut=self._config.cut,
        )

    @cached_property
    def _speed(self) -> _SpeedComparison:
        return _SpeedComparison(self._small(self._reference), self._config.repeat)

    def quality(self, format_: Format) -> dict[str, Any]:
        if format_.name == REFERENCE:
            return self._reference_quality()
        config = self._config_of(format_)
        served = self._quality.build(config)
        network = served.weights.network
        figures: dict[str, Any] = {
            "bits": _bits_per_weight(network),
            "weight_bytes": served.weights.weight_bytes,
            "file_bytes": self._file_bytes(format_, config),
            "kernels": weight_kernels(network),
        }
        as_served = exact = self._quality.compare(served)
        # If every GEMM uses torch, float32 arithmetic gives the same results.
        linears = [module for module in network.modules() if isinstance(module, Linear)]
        if any(gemm.kernel != "torch" for linear in linears for gemm in linear.gemms):
            del served, network
            exact = self._quality.compare(self._quality.build(self._exact(config)))
        served_row = _quality_row(as_served)
        keys = ("perplexity", "increase_pct", "kl_mean", "agreement")
        return figures | _quality_row(exact) | {f"served_{key}": served_row[key] for key in keys}

    def speed(self, format_: Format) -> dict[str, Any]:
        if format_.name == REFERENCE:
            return self._speed.reference_row()
        return self._speed.row(self._small(self._config_of(format_)))

    def _reference_quality(self) -> dict[str, Any]:
        weights = self._quality.reference.weights
        quality = self._quality.reference_quality()
        return {
            "bits": _bits_per_weight(weights.network),
            "weight_bytes": weights.weight_bytes,
            "tokens": quality.tokens,
            "perplexity": _short(quality.perplexity),
            "perplexity_error": _short(quality.perplexity_error),
        }

    def _config_of(self, format_: Format) -> EngineConfig:
        model = self._checkpoints.model_of(format_)
        return self._engine_config("auto", {**format_.options, "model": model})

    def _file_bytes(self, format_: Format, config: EngineConfig) -> int | None:
        """Size of the checkpoint on disk; None for formats that are quantised while loading."""
        if format_.online:
            return None
        return sum(file.stat().st_size for file in open_model(config).files.weights)

    def _engine_config(self, dtype: str, changes: dict[str, Any]) -> EngineConfig:
        return EngineConfig.of(**{**self._config.options, "dtype": dtype, **changes})

    @staticmethod
    def _exact(config: EngineConfig) -> EngineConfig:
        return replace(config, model=replace(config.model, dtype="float32"))

    @staticmethod
    def _small(config: EngineConfig) -> EngineConfig:
        """Limit the KV cache, since two engines are in memory at the same time."""
        return replace(config, cache=replace(config.cache, num_blocks=_NUM_BLOCKS))


class _SpeedComparison:
    """Measures engines in alternation with the reference's engine, which it owns.

    The speed of a shared CPU drifts within minutes: the ratio of two consecutive runs is stable even
    when neither speed is.
    """

    def __init__(self, reference: EngineConfig, repeat: int) -> None:
        self._workloads = {rows: find(f"decode_b{rows}", _SIZES) for rows in (1, 8)}
        self._repeat = repeat
        self._reference = self._engine(reference)

    def reference_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for rows, work in self._workloads.items():
            runs = [_decode_tok_s(self._reference, work, i) for i in range(self._repeat)]
            row |= {f"tok_s_b{rows}": round(median(runs), 2), f"speedup_b{rows}": 1.0}
        return row

    def row(self, config: EngineConfig) -> dict[str, Any]:
        """Speeds by batch size, also relative to the reference."""
        engines = self._engine(config), self._reference
        row: dict[str, Any] = {}
        for rows, work in self._workloads.items():
            pairs = [
                [_decode_tok_s(engine, work, i) for engine in engines] for i in range(self._repeat)
            ]
            row[f"tok_s_b{rows}"] = round(median(own for own, _ in pairs), 2)
            row[f"speedup_b{rows}"] = round(median(own / other for own, other in pairs), 2)
        return row

    def _engine(self, config: EngineConfig) -> WindlassEngine:
        engine = WindlassEngine(config, open_model(config))
        for workload in self._workloads.values():  # warm up
            requests = workload.requests(engine.vocab_size)
            engine.run([Request(request.prompt[:16], 4) for request in requests])
        return engine


def _decode_tok_s(engine: WindlassEngine, workload: Workload, draw: int) -> float:
    result = run_draw(engine, workload, draw + 1)
    assert result.window is not None, "all requests of a decode workload decode together"
    return result.window.tok_s


def _bits_per_weight(network: Network) -> float:
    """Bits per weight of the decoder's matrices in memory, including scales."""
    num_bytes = weights = 0
    for path, module in network.named_modules():
        if isinstance(module, Linear) and not path.endswith(_HEAD):
            num_bytes += module.gemm_bytes
            num_bytes += module.weight.nbytes if module.weight is not None else 0
            weights += sum(module.parts.values()) * module.num_in
    return round(8 * num_bytes / weights, 2)


def _quality_row(quality: Quality) -> dict[str, Any]:
    against = quality.against
    assert against is not None
    return {
        "tokens": quality.tokens,
        "perplexity": _short(quality.perplexity),
        "increase_pct": _short(100 * (against.ppl_ratio - 1)),
        "increase_error_pct": _short(100 * against.ppl_ratio_error),
        "kl_mean": _short(against.kl_mean),
        "kl_p99": _short(against.kl_p99),
        "agreement": _short(against.agreement),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _status(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    if "tok_s_b1" in row:
        return f"{row['tok_s_b1']:g} and {row['tok_s_b8']:g} tok/s with 1 and 8 rows"
    return f"perplexity {row['perplexity']:g}, agreement {row.get('agreement', 1):.2%}"
