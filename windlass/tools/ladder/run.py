"""Runs `windlass ladder`: measures rung after rung and saves each finished row.

An interrupted run resumes when it is started with the same options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError, UnsupportedError
from windlass.tools.common.price import price_of
from windlass.tools.common.record import Record, hardware, saved_rows
from windlass.tools.eval.data import Corpus, read_corpus, short_corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.ladder.measure import Bench
from windlass.tools.ladder.progress import ProgressBar, progress_bar
from windlass.tools.ladder.record import is_measured, make_record
from windlass.tools.ladder.rungs import BASE_WEIGHTS, Variant, all_rungs, choose, make_variants
from windlass.tools.ladder.weights import LadderWeights, WeightInputs
from windlass.tools.ladder.workload import LadderLoad, WorkloadMix, find_loads

Log = Callable[[str], None]
Row = dict[str, Any]

_CONTEXT = 256
_ON_GPU = {
    "num_requests": 256,
    "low_requests": 6,
    "prefix_len": 1024,
    "input_len": 64,
    "output_len": 128,
    "naive_requests": 32,
}


_STATIC_OPTIONS = ("max_batch_size", "max_wait_ms")  # of static batching alone


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """What to measure, and the output file."""

    options: dict[str, Any]
    output: Path
    names: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    weights: str | None = None  # weights that later rungs stack on; None: the last available
    sizes: Mapping[str, Any] = field(default_factory=dict)  # overrides of the workload mix
    data: str | None = None
    price_per_hour: float | None = None
    inputs: WeightInputs = field(default_factory=WeightInputs)

    def spec(self) -> dict[str, Any]:
        given = {k: v for k, v in self.options.items() if k.startswith("spec")}
        if given.get("spec", "ngram") == "none":
            raise ConfigError("--spec none: exclude the rung with --rungs instead.")
        return {"spec": "ngram", **given}

    def static(self) -> dict[str, Any]:
        """The options of the rung with static batching, which only it has."""
        given = {k: v for k, v in self.options.items() if k in _STATIC_OPTIONS}
        return {"batching": "static", **given}

    def common(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k not in _STATIC_OPTIONS}


class Ladder:
    """One run of the ladder: its variants, and the rows measured so far."""

    def __init__(self, config: LadderConfig, log: Log) -> None:
        self._config = config
        self._log = log
        spec, static = config.spec(), config.static()
        EngineConfig.of(**{**config.options, **spec, **static})  # reject bad options first
        mix = WorkloadMix(**config.sizes)
        choose(all_rungs("", spec=spec, static=static), config.names)
        load_names = find_loads(config.loads)
        _check_checkpoints(config)
        self._weights = LadderWeights(config.common(), config.inputs, log)
        device = self._weights.device.type
        if device == "cuda":
            mix = WorkloadMix(**{**_ON_GPU, **config.sizes})
        self._price = price_of(config.price_per_hour, device)
        rungs = all_rungs(_kv_dtype(device), spec=spec, static=static)
        self._rungs = choose(rungs, config.names)
        self._missing = self._find_missing()
        self.variants = make_variants(self._rungs, self._stack_weights(), list(self._missing))
        loads = mix.loads(self._weights.source.card)
        self._loads = {name: loads[name] for name in load_names}
        self._check_length()
        self._corpus = self._find_corpus()
        context = min(_CONTEXT, self._weights.source.hparams.max_positions)
        self._cut = Cut("strided", context, context)
        self._mix = mix
        self._settings = json.loads(json.dumps(self._make_settings(), default=str))
        # Rows without figures are measured again.
        before = saved_rows(config.output, "ladder", self._settings)
        self._rows = {f"{row['rung']}, {row['mode']}": row for row in before if is_measured(row)}

    @property
    def todo(self) -> list[Variant]:
        return [variant for variant in self.variants if variant.key not in self._rows]

    def run(self, show_progress: bool) -> bool:
        """Measure the remaining variants; return False after ctrl-C, which keeps the finished rows."""
        todo = self.todo
        if len(todo) < len(self.variants):
            done = len(self.variants) - len(todo)
            self._log(f"{self._config.output} already has {done} of {len(self.variants)} rows")
        bench = Bench(
            self._weights,
            self._loads,
            naive_requests=self._mix.naive_requests,
            price=self._price,
            corpus=self._corpus,
            cut=self._cut,
        )
        for row in self._rows.values():
            if row.get("perplexity") is not None:
                kept = ("perplexity", "agreement", "kl_mean", "tokens")
                bench.qualities[row["format"]] = {key: row[key] for key in kept}
        complete = True
        with progress_bar(len(todo), show_progress) as bar:
            try:
                if any(variant.weights not in self._missing for variant in todo):
                    bar.begin("loading the base")
                    bench.prepare()
                for variant in todo:
                    bar.begin(variant.key)
                    self._rows[variant.key] = self._row(bench, variant, bar)
                    self.record().save(self._config.output)
                    bar.done()
            except KeyboardInterrupt:
                complete = False
        self.record().save(self._config.output)
        return complete

    def record(self) -> Record:
        ordered = [self._rows[it.key] for it in self.variants if it.key in self._rows]
        return make_record(ordered, self._settings, num_left=len(self.variants) - len(ordered))

    def _row(self, bench: Bench, variant: Variant, bar: ProgressBar) -> Row:
        rung = variant.rung
        row = {"rung": rung.name, "title": rung.title, "kind": rung.kind, "mode": variant.mode}
        if variant.weights in self._missing:
            return row | {"reason": self._missing[variant.weights]}
        try:
            return row | bench.measure(variant, bar.phase, bar.tokens)
        except EngineError as error:
            return row | {"reason": str(error)}

    def _find_missing(self) -> dict[str, str]:
        """Unavailable weights, with the reason."""
        missing = {}
        for rung in self._rungs:
            if rung.weights is not None:
                try:
                    self._weights.options_of(rung.weights)
                except UnsupportedError as error:
                    missing[rung.weights] = str(error)
        return missing

    def _stack_weights(self) -> str | None:
        requested = self._config.weights
        possible = [
            it.weights for it in self._rungs if it.weights and it.weights not in self._missing
        ]
        if requested is not None and requested not in possible:
            raise ConfigError(
                f"--weights {requested}: available are {', '.join(possible) or 'none'}."
            )
        return requested

    def _check_length(self) -> None:
        request_len = max(load.max_request_len for load in self._loads.values())
        max_len = self._weights.source.hparams.max_positions
        if request_len > max_len:
            raise ConfigError(
                f"the longest request has {request_len:,} tokens, and the model {max_len:,} "
                "positions. Lower --prefix-len, --input-len, --output-len or --turns."
            )

    def _find_corpus(self) -> Corpus | None:
        if self._weights.config.model.load_format == "dummy":
            return None
        if self._config.data is not None:
            return read_corpus(self._config.data)
        return short_corpus()

    def _make_settings(self) -> dict[str, Any]:
        return {
            **self._config.options,
            "name": self._weights.source.card.name,
            "rungs": [rung.name for rung in self._rungs],
            "weights": self._config.weights,
            "checkpoints": self._config.inputs.checkpoints,
            **asdict(self._mix),
            "low": _about(self._loads.get("low")),
            "saturation": _about(self._loads.get("sat")),
            "text": self._corpus.name if self._corpus else None,
            "base": self._weights.about(BASE_WEIGHTS),
            "device": self._weights.device.type,
            "machine": hardware(),
            "price_per_hour": self._price.per_hour,
            "price": self._price.reason,
        }


def _about(load: LadderLoad | None) -> str | None:
    if load is None:
        return None
    prompts = sorted(len(request.prompt) for request in load.requests)
    outputs = sorted(request.num_output for request in load.requests)
    return (
        f"{len(load.requests)} requests, {load.name}, prompts of {prompts[0]} to {prompts[-1]} tokens, "
        f"outputs of {outputs[0]} to {outputs[-1]}"
    )


def _kv_dtype(device: str) -> str:
    if device == "cpu":
        return "int8"
    import torch

    from windlass.kernels.gpu import gpu_of

    return "fp8" if gpu_of(torch.device(device)).lacks_fp8() is None else "int8"


def _check_checkpoints(config: LadderConfig) -> None:
    """Reject missing or invalid checkpoints before anything is measured."""
    for model in (config.inputs.checkpoints or {}).values():
        open_model(EngineConfig.of(**{**config.common(), "model": model}))
    calibration = config.inputs.calibration
    if calibration is not None and not calibration.is_file():
        raise ConfigError(f"--calibration {calibration}: there is no such file.")
