"""What every weight format costs in quality, and gives in bytes and speed: one row each.

Every finished row is saved at once, and a run that was ended goes on where it was. A format that
cannot be made or loaded is a row with the reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError
from windlass.tools.bench.format_list import (
    FORMATS,
    REFERENCE,
    Format,
    Log,
    Means,
    Workshop,
    find_formats,
)
from windlass.tools.common.device import release_memory
from windlass.tools.common.judge import (
    Judge,
    Race,
    Speed,
    bits_a_weight,
    held_as,
    is_unpacked,
)
from windlass.tools.common.record import Record, rows_before
from windlass.tools.common.workload import Sizes
from windlass.tools.eval.data import Corpus, read_corpus
from windlass.tools.eval.metrics import Quality
from windlass.tools.eval.windows import Cut

_NOTES = (
    "perplexity, KL and agreement: the format's weights in float32 arithmetic, against the same "
    "weights before. As served: with the kernels that this device takes, whose own rounding "
    "adds to it. bits: of the decoder's matrices in memory, scales included; 3-bit codes lie in "
    "4 bits there."
)
_SPEED_NOTE = " tok/s: decoding, and times the float32 model, which ran in turns with each."
_BLOCKS = 256  # KV pages, more than the short runs need
_SIZES = Sizes(input_len=32, output_len=32)


@dataclass(frozen=True, slots=True)
class FormatsOrder:
    """What to measure, on which text, and where."""

    options: dict[str, Any]
    names: Sequence[str]
    data: str
    cut: Cut
    means: Means
    num_samples: int
    sample_tokens: int
    repeat: int
    speed: bool  # whether to measure it
    work: Path
    output: Path

    def __post_init__(self) -> None:
        for name in ("num_samples", "repeat"):
            if getattr(self, name) < 1:
                flag = name.removeprefix("num_")
                raise ConfigError(f"--{flag} must be at least 1, got {getattr(self, name)}.")
        taken = [
            name
            for name in ("dtype", "quantization", "quantize_head", "kv_cache_dtype")
            if name in self.options
        ]
        if taken:
            raise ConfigError(
                f"--{taken[0].replace('_', '-')} is what the formats differ in. Leave it out."
            )
        text, folder = self.means.calibration, self.means.gguf_dir
        if text is not None and not text.is_file():
            raise ConfigError(f"--calibration {text}: there is no such file.")
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"--gguf-dir {folder}: there is no such folder.")

    def settings(self, model_name: str, data_name: str) -> dict[str, Any]:
        """What all rows depend on."""
        text = self.means.calibration
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


def measure(order: FormatsOrder, log: Log) -> Record:
    """Measure what is not in the output file yet, and save after each row."""
    formats = find_formats(order.names, order.means, log)
    corpus = read_corpus(order.data)
    bench = _Bench(order, corpus, log)
    settings = json.loads(json.dumps(order.settings(bench.model_name, corpus.name), default=str))
    rows = _rows_before(order.output, settings)
    # All of the quality first: speeds are then measured within minutes of each other.
    steps = {"perplexity": bench.quality} | ({"tok_s_b1": bench.speed} if order.speed else {})
    done = [each for each in formats if rows.get(each.name, {}).keys() >= steps.keys()]
    if done:
        log(f"{order.output} holds {len(done)} of {len(formats)} rows already")
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
            log(f"{number} of {len(todo)}, {each.name}: {_in_words(row)}")
            _record(rows, settings).save(order.output)
            release_memory()
    return _record(rows, settings)


def _rows_before(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows that an earlier run finished; those that failed are tried again."""
    rows = rows_before(path, "formats", settings)
    return {row["format"]: row for row in rows if "error" not in row}


def _record(rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> Record:
    ordered = [rows[each.name] for each in FORMATS if each.name in rows]
    failed = [f" {row['format']} failed: {row['error']}" for row in ordered if "error" in row]
    speeds = _SPEED_NOTE if any("tok_s_b1" in row for row in ordered) else " Speeds: not measured."
    return Record("formats", ordered, _NOTES + speeds + "".join(failed), settings)


class _Bench:
    """Holds the float32 model for as long as the others are compared with it."""

    def __init__(self, order: FormatsOrder, corpus: Corpus, log: Log) -> None:
        self._order = order
        self._corpus = corpus
        base = EngineConfig.of(**order.options)
        self._reference = self._config("float32", {})
        self._opened = open_model(base)
        samples = (order.num_samples, order.sample_tokens)
        self._workshop = Workshop(base, self._opened, order.work, order.means, *samples, log)

    @property
    def model_name(self) -> str:
        return self._opened.card.name

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self._reference, self._opened, self._corpus, self._order.cut)

    @cached_property
    def _race(self) -> Race:
        return Race(self._small(self._reference), self._order.repeat, _SIZES)

    def quality(self, wanted: Format) -> dict[str, Any]:
        """Bytes and quality of a format."""
        if wanted.name == REFERENCE:
            return self._reference_quality()
        config = self._config_of(wanted)
        served = self._judge.build(config)
        network = served.weights.network
        figures: dict[str, Any] = {
            "bits": round(bits_a_weight(network), 2),
            "weight_bytes": served.weights.weight_bytes,
            "file_bytes": self._file_bytes(wanted, config),
            "held": held_as(network),
        }
        as_served = exact = self._judge.compare(served)
        if not is_unpacked(network):
            del served, network
            exact = self._judge.compare(self._judge.build(self._exact(config)))
        return figures | _quality(exact) | _as_served(as_served)

    def speed(self, wanted: Format) -> dict[str, Any]:
        if wanted.name == REFERENCE:
            return _speeds(self._race.alone())
        return _speeds(self._race.against(self._small(self._config_of(wanted))))

    def _reference_quality(self) -> dict[str, Any]:
        weights = self._judge.reference.weights
        quality = self._judge.alone()
        return {
            "bits": round(bits_a_weight(weights.network), 2),
            "weight_bytes": weights.weight_bytes,
            "tokens": quality.tokens,
            "perplexity": _short(quality.perplexity),
            "perplexity_error": _short(quality.perplexity_error),
        }

    def _config_of(self, wanted: Format) -> EngineConfig:
        return self._config("auto", {**wanted.options, "model": self._workshop.model_of(wanted)})

    def _file_bytes(self, wanted: Format, config: EngineConfig) -> int | None:
        """What the format takes on disk, where it is a file."""
        if wanted.online:
            return None
        return sum(file.stat().st_size for file in open_model(config).files.weights)

    def _config(self, dtype: str, changes: dict[str, Any]) -> EngineConfig:
        return EngineConfig.of(**{**self._order.options, "dtype": dtype, **changes})

    @staticmethod
    def _exact(config: EngineConfig) -> EngineConfig:
        return replace(config, model=replace(config.model, dtype="float32"))

    @staticmethod
    def _small(config: EngineConfig) -> EngineConfig:
        """Two engines are in memory at once, and need few pages."""
        return replace(config, cache=replace(config.cache, num_blocks=_BLOCKS))


def _quality(found: Quality) -> dict[str, Any]:
    against = found.against
    assert against is not None
    return {
        "tokens": found.tokens,
        "perplexity": _short(found.perplexity),
        "increase_pct": _short(100 * (against.ppl_ratio - 1)),
        "increase_error_pct": _short(100 * against.ppl_ratio_error),
        "kl_mean": _short(against.kl_mean),
        "kl_p99": _short(against.kl_p99),
        "agreement": _short(against.agreement),
    }


def _as_served(found: Quality) -> dict[str, Any]:
    against = found.against
    assert against is not None
    return {
        "served_perplexity": _short(found.perplexity),
        "served_increase_pct": _short(100 * (against.ppl_ratio - 1)),
        "served_kl_mean": _short(against.kl_mean),
        "served_agreement": _short(against.agreement),
    }


def _speeds(speeds: dict[int, Speed]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, speed in speeds.items():
        found |= {
            f"tok_s_b{rows}": round(speed.tok_s, 2),
            f"speedup_b{rows}": round(speed.ratio, 2),
        }
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _in_words(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    if "tok_s_b1" in row:
        return f"{row['tok_s_b1']:g} and {row['tok_s_b8']:g} tok/s with 1 and 8 rows"
    return f"perplexity {row['perplexity']:g}, agreement {row.get('agreement', 1):.2%}"
