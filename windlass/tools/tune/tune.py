"""`windlass tune`: chooses formats, searches on the simulator, and measures the best settings.

Engines with the same weight format share the loaded weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.card import Capacity
from windlass.errors import ConfigError, EngineError
from windlass.models.card import open_checkpoint
from windlass.runner.device import choose_device
from windlass.runner.load import load_network
from windlass.tools.common.device import release_memory
from windlass.tools.common.drive import EngineRun, replay
from windlass.tools.common.load import Load
from windlass.tools.common.requests import max_request_len
from windlass.tools.common.slo import Slo
from windlass.tools.eval.compare import QualityComparison
from windlass.tools.eval.data import short_corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.plan.formats import FORMATS, STORED
from windlass.tools.plan.quality import Retention, retention_of
from windlass.tools.plan.select import Plan, select_quantization
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.step_costs import MeasuredSteps, get_step_costs, max_context
from windlass.tools.plan.what_if import WARM_UP
from windlass.tools.tune.results import TrialResult, best_of
from windlass.tools.tune.search import Search, import_optuna
from windlass.tools.tune.space import (
    SPECS,
    ModelFormat,
    Settings,
    choose_formats,
    stored_quality,
)

if TYPE_CHECKING:
    from windlass.runner.load import Loaded

Log = Callable[[str], None]
_QUALITY_CONTEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Options of a search. `engine_options` are the user's own, as `LLM` takes them."""

    engine_options: Mapping[str, Any]
    load: Load
    slo: Slo
    min_quality: float = 0.0
    num_trials: int = 60
    num_finalists: int = 3
    max_formats: int = 2
    formats: tuple[str, ...] = ()  # only these; empty: the fastest `max_formats`
    num_runs: int = 2  # of every finalist, in turns
    speculate: bool = True
    price_per_hour: float | None = None
    records: Path | None = None


@dataclass(slots=True)
class TuneResult:
    """Results so far; consistent after every trial, so that an interrupted search keeps them."""

    predicted: list[TrialResult] = field(default_factory=list)  # the best of the search
    measured: list[TrialResult] = field(default_factory=list)
    num_predicted: int = 0
    num_pruned: int = 0
    left_out: str = ""  # formats, and why
    interrupted: bool = False

    def add(self, result: TrialResult) -> None:
        """Add a measured run to the result of its settings, or as a new result."""
        for i, item in enumerate(self.measured):
            if item.settings.title == result.settings.title:
                self.measured[i] = item.with_run(result.runs[0], result.summaries[0])
                return
        self.measured.append(result)

    @property
    def best(self) -> TrialResult | None:
        """The best measured result; the best predicted one if nothing was measured."""
        if self.measured:
            return best_of(self.measured)
        return max(self.predicted, key=lambda item: item.rank, default=None)


def _announcement(finalists: Sequence[TrialResult], config: TuneConfig) -> str:
    """How many runs follow, and the time that the simulation expects for them."""
    seconds = [item.runs[0].duration for item in finalists]
    num_more = 1 + len(SPECS) if config.speculate else 0  # of the best settings
    num_runs = config.num_runs * (len(finalists) + num_more)
    total = config.num_runs * (sum(seconds) + num_more * min(seconds))
    shown = f"{total:.0f} s" if total < 120 else f"{total / 60:.0f} minutes"
    return f"measuring: {num_runs} runs, about {shown} and the time to start {num_runs} engines"


class Tuner:
    """Tunes one model on this machine for one load."""

    def __init__(self, config: TuneConfig, log: Log) -> None:
        import_optuna()
        self._config = config
        self._log = log
        self._base = EngineConfig.of(**config.engine_options)
        self._opened = open_model(self._base)
        self._device = choose_device(self._base.model).type
        self._requests = config.load.requests(self._opened.card, log)
        self._weights: tuple[str, Loaded] | None = None  # of one format at a time
        self._steps: dict[str, MeasuredSteps] = {}  # by format
        self._comparison: QualityComparison | None = None  # while formats are measured
        self.found = TuneResult()

    @property
    def model(self) -> str:
        return self._opened.files.name

    def run(self) -> TuneResult:
        """Search and measure; ctrl-C ends it early with the results so far."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.found.interrupted = True
        return self.found

    def _run(self) -> None:
        config, found = self._config, self.found
        self._log(
            f"first the formats are measured, then {config.num_trials} settings are simulated, and "
            f"the best {config.num_finalists} run {len(self._requests):,} requests each, "
            f"{config.num_runs} times; how long that takes is known after the simulation"
        )
        formats = self._formats()
        start = self._base.limits(self._device)  # the device's defaults, or those of --profile
        search = Search(
            formats=formats,
            device=self._device,
            predict=self._predict,
            start=start,
            seed=self._base.model.seed,
        )
        try:
            search.run(config.num_trials)
        finally:
            found.predicted = search.best(config.num_finalists)
            found.num_predicted, found.num_pruned = len(search.tried), search.num_pruned
        if not found.predicted:
            raise ConfigError(
                f"none of {config.num_trials} settings can serve this load: its longest request has "
                f"{max_request_len(self._requests):,} tokens. Raise --trials, or shorten the requests."
            )
        self._log(f"{found.num_predicted} settings simulated, {found.num_pruned} invalid")
        first = Settings(formats[0], start.max_num_seqs, start.max_num_batched_tokens)
        baseline = search.tried.get(first.title)
        finalists = list(found.predicted)
        if baseline is not None and baseline not in finalists:
            finalists.append(baseline)
        # Finalists that share weights are measured one after the other.
        finalists.sort(key=lambda each: each.settings.format.name)
        self._log(_announcement(finalists, config))
        self._measure_in_turns([item.settings for item in finalists])
        if config.speculate and found.best is not None:
            best = found.best.settings
            self._measure_in_turns([best, *(replace(best, spec=spec) for spec in SPECS)])

    def _measure_in_turns(self, settings: list[Settings]) -> None:
        """Measure forwards and backwards: disturbances affect all, and few weights are reloaded."""
        for turn in range(self._config.num_runs):
            for each in settings if turn % 2 == 0 else reversed(settings):
                self._measure(each)

    def _formats(self) -> tuple[ModelFormat, ...]:
        config = self._config
        planned = (
            "quantization",
            "quantize_head",
            "kv_cache_dtype",
            "max_num_seqs",
            "num_blocks",
            "max_model_len",
        )
        options = {k: v for k, v in config.engine_options.items() if k not in planned}
        plan = select_quantization(
            **options,
            min_quality=config.min_quality,
            context=min(max_request_len(self._requests), self._opened.hparams.max_positions),
            concurrency=1,
            formats=config.formats or ((STORED,) if config.max_formats == 1 else FORMATS),
            records=config.records,
        )
        self._check_named_formats(plan)
        max_formats = len(config.formats) or config.max_formats
        formats, self.found.left_out = choose_formats(plan, max_formats, bool(config.formats))
        if not formats:
            raise ConfigError(f"no format of this model can be tuned: {plan.shortfall}")
        self._log(f"formats: {', '.join(format.name for format in formats)}")
        return self._measure_formats(formats, stored_quality(plan))

    def _check_named_formats(self, plan: Plan) -> None:
        for name in self._config.formats:
            if name in plan.refused:
                raise ConfigError(f"--formats {name}: {plan.refused[name]}.")

    def _measure_formats(
        self, formats: Sequence[ModelFormat], stored: Retention
    ) -> tuple[ModelFormat, ...]:
        """Measure quality and step costs of each format; return the formats with enough quality."""
        options = self._config.engine_options
        is_real, good, poor = self._base.model.load_format != "dummy", [], []
        for format in formats:
            config = EngineConfig.of(**{**options, **format.options})
            known = format.quality.basis in ("reference", "measured")
            weights = None
            if is_real and not known:
                weights = self._load(format, config)
                format = self._with_measured_quality(format, weights, stored)
            if not format.quality.meets(self._config.min_quality):
                poor.append(format)
                continue
            self._steps[format.name] = get_step_costs(
                config, self._opened, log=self._log, weights=weights
            )
            good.append(format)
        if poor:
            names = ", ".join(f"{format.name} ({format.quality.value:.4f})" for format in poor)
            more = f"measured below --min-quality {self._config.min_quality:g}: {names}"
            self.found.left_out = "; ".join(filter(None, (self.found.left_out, more)))
        if not good:
            raise ConfigError(f"no format has enough quality; {self.found.left_out}.")
        self._comparison = None
        release_memory()
        return tuple(good)

    def _with_measured_quality(
        self, format: ModelFormat, weights: Loaded, stored: Retention
    ) -> ModelFormat:
        """Measure the perplexity on short texts; return the format unchanged if measuring fails.

        The reference is the model without online quantisation: float32 on a CPU, its own dtype on a GPU.
        `stored`: the expected loss of a quantised file relative to its original, which cannot be measured
        without the original.
        """
        options, corpus = self._config.engine_options, short_corpus()
        try:
            if self._comparison is None:
                exact = {"dtype": "float32"} if self._device == "cpu" else {}
                context = min(_QUALITY_CONTEXT, self._opened.hparams.max_positions)
                self._comparison = QualityComparison(
                    reference=EngineConfig.of(**{**options, **exact}),
                    opened=self._opened,
                    corpus=corpus,
                    cut=Cut("strided", context, context),
                )
            config = EngineConfig.of(**{**options, **format.options})
            found = self._comparison.compare(self._comparison.build(config, weights))
        except EngineError as error:
            self._log(f"{format.name}: quality not measured: {error}")
            return format
        assert found.against is not None
        value = retention_of(found.against.ppl_ratio)
        measured = Retention(value, "measured", f"on {corpus.name}")
        self._log(f"{format.name}: measured quality {value:.4f}")
        return replace(format, quality=stored.times(measured))

    def _predict(self, settings: Settings, share: float) -> TrialResult:
        """Simulate the settings with a share of the default KV blocks."""
        config = settings.config(self._config.engine_options)
        limits, steps = config.limits(self._device), self._steps[settings.format.name]
        capacity = steps.capacity(config, self._opened, limits)
        context = max_context(config, self._opened)
        # Room for one request of the whole context, even if this load has none.
        min_blocks = capacity.layout.blocks_for(context, 2 * limits.max_num_batched_tokens)
        num_blocks = max(min_blocks, int(share * capacity.num_blocks))
        if num_blocks < capacity.num_blocks:
            capacity = replace(capacity, num_blocks=num_blocks)
            settings = replace(settings, num_blocks=num_blocks)
        run = simulate(
            self._requests,
            steps.costs,
            config=config,
            limits=limits,
            capacity=capacity,
            max_model_len=context,
            max_concurrency=self._config.load.max_concurrency,
            overlap=self._device == "cuda",
        )
        return self._result(settings, run, capacity, is_measured=False)

    def _result(
        self, settings: Settings, run: EngineRun, capacity: Capacity, *, is_measured: bool
    ) -> TrialResult:
        config = self._config
        return TrialResult(
            settings=settings,
            is_measured=is_measured,
            runs=(run,),
            summaries=(config.slo.summarise(run),),
            slo=config.slo,
            kv_bytes=capacity.num_blocks * capacity.bytes_per_block,
            price_per_hour=config.price_per_hour,
        )

    def _measure(self, settings: Settings) -> None:
        """Run the load on an engine in this process; log and skip settings that the engine refuses."""
        config = settings.config(self._config.engine_options)
        try:
            built = build_engine(config, self._opened.source, self._load(settings.format, config))
        except EngineError as error:
            self._log(f"{settings.title}: left out: {error}")
            return
        replay(built.engine, WARM_UP)
        built.engine.reset_prefix_cache()
        max_concurrency = self._config.load.max_concurrency
        run = replay(built.engine, self._requests, max_concurrency=max_concurrency)
        result = self._result(settings, run, built.report.capacity, is_measured=True)
        misses = "" if result.meets_slo else f"; {'; '.join(result.slo.misses(result.summary))}"
        self.found.add(result)
        self._log(f"{settings.title}: {result.summary.output_throughput:,.1f} tok/s{misses}")
        del built
        release_memory()

    def _load(self, format: ModelFormat, config: EngineConfig) -> Loaded:
        key = format.weights_key
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            checkpoint = open_checkpoint(self._opened.files, config.model)
            self._weights = (key, load_network(config, self._opened.hparams, checkpoint))
        return self._weights[1]
