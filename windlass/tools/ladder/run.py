"""`windlass ladder`: measures rung after rung, and saves each as it comes.

A run that was ended goes on where it was, if it is started with the same options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError, UnsupportedError
from windlass.tools.common.judge import short_corpus
from windlass.tools.common.price import price_of
from windlass.tools.common.record import Record, hardware, rows_before
from windlass.tools.eval.data import Corpus, read_corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.ladder.forms import Forms, Given
from windlass.tools.ladder.measure import Bench
from windlass.tools.ladder.record import make_record
from windlass.tools.ladder.rungs import Variant, all_rungs, choose, climb
from windlass.tools.ladder.work import Mix, Work, find_loads

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


class Bar(Protocol):
    """Where a run stands: `begin` with a variant, `done` after it, tokens in between."""

    def begin(self, title: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def tokens(self, count: int) -> None: ...

    def done(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LadderOrder:
    """What to measure, and where it goes."""

    options: dict[str, Any]
    output: Path
    names: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    weights: str | None = None  # the form that later rungs stand on; None: the last that can be
    sizes: Mapping[str, Any] = field(default_factory=dict)  # of the mix, where not the device's own
    data: str | None = None
    price_per_hour: float | None = None
    given: Given = field(default_factory=Given)

    def spec(self) -> dict[str, Any]:
        """The settings of the speculation rung."""
        wanted = {k: v for k, v in self.options.items() if k.startswith("spec")}
        if wanted.get("spec", "ngram") == "none":
            raise ConfigError("--spec none: leave the rung out instead, with --rungs.")
        return {"spec": "ngram", **wanted}


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rows so far; `complete` is false when the run was interrupted."""

    record: Record
    complete: bool


class Ladder:
    """One run: what there is to measure, what is there already, and the rest."""

    def __init__(self, order: LadderOrder, log: Log) -> None:
        self._order = order
        self._log = log
        spec = order.spec()
        EngineConfig.of(**{**order.options, **spec})  # a bad option is refused before all else
        mix = Mix(**order.sizes)
        choose(all_rungs("", spec), order.names)
        loads = find_loads(order.loads)
        _check_checkpoints(order)
        self._forms = Forms(order.options, order.given, log)
        device = self._forms.device.type
        if device == "cuda":
            mix = Mix(**{**_ON_GPU, **order.sizes})
        self._price = price_of(order.price_per_hour, device)
        self._rungs = choose(all_rungs(_kv_dtype(device), spec), order.names)
        self._missing = self._find_missing()
        self.variants = climb(self._rungs, self._standing(), list(self._missing))
        works = dict(zip(("low", "sat"), mix.works(self._forms.source.card), strict=True))
        self._works = {name: works[name] for name in loads}
        self._check_length()
        self._corpus = self._find_corpus()
        context = min(_CONTEXT, self._forms.source.hparams.max_positions)
        self._cut = Cut("strided", context, context)
        self._mix = mix
        self._settings = json.loads(json.dumps(self._make_settings(), default=str))
        self._rows = _rows_before(order.output, self._settings)

    @property
    def todo(self) -> list[Variant]:
        return [variant for variant in self.variants if variant.key not in self._rows]

    def run(self, watched: Callable[[int], AbstractContextManager[Bar]]) -> Outcome:
        """Measure what is missing. Ctrl-C ends it early, with what was measured until then."""
        todo = self.todo
        if len(todo) < len(self.variants):
            done = len(self.variants) - len(todo)
            self._log(f"{self._order.output} holds {done} of {len(self.variants)} rows already")
        naive = self._mix.naive_requests
        bench = Bench(self._forms, self._works, naive, self._price, self._corpus, self._cut)
        for row in self._rows.values():
            if row.get("perplexity") is not None:
                kept = ("perplexity", "agreement", "kl_mean", "tokens")
                bench.qualities[row["format"]] = {key: row[key] for key in kept}
        complete = True
        with watched(len(todo)) as bar:
            try:
                if any(variant.weights not in self._missing for variant in todo):
                    bar.begin("loading the base")
                    bench.prepare()
                for variant in todo:
                    bar.begin(variant.key)
                    self._rows[variant.key] = self._row(bench, variant, bar)
                    self.record().save(self._order.output)
                    bar.done()
            except KeyboardInterrupt:
                complete = False
        record = self.record()
        record.save(self._order.output)
        return Outcome(record, complete)

    def record(self) -> Record:
        ordered = [self._rows[it.key] for it in self.variants if it.key in self._rows]
        rungs = {rung.name: rung for rung in self._rungs}
        left = len(self.variants) - len(ordered)
        return make_record(ordered, rungs, self._settings, left)

    def _row(self, bench: Bench, variant: Variant, bar: Bar) -> Row:
        rung = variant.rung
        row = {"rung": rung.name, "title": rung.title, "kind": rung.kind, "how": variant.way}
        if variant.weights in self._missing:
            return row | {"reason": self._missing[variant.weights]}
        try:
            return row | bench.measure(variant, bar.phase, bar.tokens)
        except EngineError as error:
            return row | {"reason": str(error)}

    def _find_missing(self) -> dict[str, str]:
        """The forms that cannot be, and why."""
        missing = {}
        for rung in self._rungs:
            if rung.weights is not None:
                try:
                    self._forms.options_of(rung.weights)
                except UnsupportedError as error:
                    missing[rung.weights] = str(error)
        return missing

    def _standing(self) -> str | None:
        wanted = self._order.weights
        possible = [
            it.weights for it in self._rungs if it.weights and it.weights not in self._missing
        ]
        if wanted is not None and wanted not in possible:
            raise ConfigError(
                f"--weights {wanted}: later rungs can stand on {', '.join(possible) or 'none'}."
            )
        return wanted

    def _check_length(self) -> None:
        longest, most = (
            max(it.longest for it in self._works.values()),
            self._forms.source.hparams.max_positions,
        )
        if longest > most:
            raise ConfigError(
                f"the longest request of the load has {longest:,} tokens, and the model {most:,} "
                "positions. Lower --prefix-len, --input-len, --output-len or --turns."
            )

    def _find_corpus(self) -> Corpus | None:
        if self._forms.config.model.load_format == "dummy":
            return None
        if self._order.data is not None:
            return read_corpus(self._order.data)
        return short_corpus()

    def _make_settings(self) -> dict[str, Any]:
        return {
            **self._order.options,
            "name": self._forms.source.card.name,
            "rungs": [rung.name for rung in self._rungs],
            "weights": self._order.weights,
            "checkpoints": self._order.given.checkpoints,
            **asdict(self._mix),
            "low": _about(self._works.get("low")),
            "saturation": _about(self._works.get("sat")),
            "text": self._corpus.name if self._corpus else None,
            "base": self._forms.about("16 bit"),
            "device": self._forms.device.type,
            "machine": hardware(),
            "price_per_hour": self._price.per_hour,
            "price": self._price.why,
        }


def _about(work: Work | None) -> str | None:
    if work is None:
        return None
    prompts = sorted(len(request.prompt) for request in work.requests)
    answers = sorted(request.num_output for request in work.requests)
    return (
        f"{len(work.requests)} requests, {work.name}, prompts of {prompts[0]} to {prompts[-1]} tokens, "
        f"answers of {answers[0]} to {answers[-1]}"
    )


def _kv_dtype(device: str) -> str:
    if device == "cpu":
        return "int8"
    import torch

    return "fp8" if torch.cuda.get_device_capability() >= (8, 9) else "int8"


def _check_checkpoints(order: LadderOrder) -> None:
    """A checkpoint that is not there, or no model, is refused before anything is measured."""
    for model in (order.given.checkpoints or {}).values():
        open_model(EngineConfig.of(**{**order.options, "model": model}))
    if order.given.calibration is not None and not order.given.calibration.is_file():
        raise ConfigError(f"--calibration {order.given.calibration}: there is no such file.")


def _rows_before(path: Path, settings: Row) -> dict[str, Row]:
    """The rows that an earlier run finished; those without figures are tried again."""
    rows = rows_before(path, "ladder", settings)
    return {f"{row['rung']}, {row['how']}": row for row in rows if "reason" not in row}
