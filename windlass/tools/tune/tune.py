"""`windlass tune` as a whole: forms that are good enough, a search on the simulator, the best measured.

Engines that hold their weights alike share them: only a new format is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError
from windlass.models.card import open_checkpoint
from windlass.runner.assemble import load_network
from windlass.runner.device import choose_device
from windlass.tools.common.device import release_memory
from windlass.tools.common.drive import EngineRun, replay
from windlass.tools.common.load import Load
from windlass.tools.common.requests import Request, longest
from windlass.tools.common.slo import Slo
from windlass.tools.plan.formats import FORMATS, STORED
from windlass.tools.plan.quality import Retention
from windlass.tools.plan.select import Plan, select_quantization
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.steps import Steps, context_of, find_steps
from windlass.tools.tune.quality import Tester
from windlass.tools.tune.search import (
    SPECS,
    Form,
    Search,
    Settings,
    Space,
    choose_forms,
    need_optuna,
    stored_quality,
)
from windlass.tools.tune.tried import Tried, best_of

if TYPE_CHECKING:
    from windlass.runner.assemble import Loaded

Log = Callable[[str], None]
_WARM_UP = (Request([1] * 32, 4),) * 2


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for. `given` are the user's own options, as `LLM` takes them."""

    given: Mapping[str, Any]
    load: Load
    slo: Slo
    min_quality: float = 0.0
    num_trials: int = 60
    num_finalists: int = 3
    max_formats: int = 2
    formats: tuple[str, ...] = ()  # these and no others; none: the fastest, `max_formats` of them
    num_runs: int = 2  # of every finalist, in turns
    speculate: bool = True
    price_per_hour: float | None = None
    records: Path | None = None


@dataclass(slots=True)
class Tuned:
    """What was found so far: it is whole after every trial, whenever somebody interrupts."""

    predicted: list[Tried] = field(default_factory=list)  # the best of the search
    measured: list[Tried] = field(default_factory=list)
    num_predicted: int = 0
    num_pruned: int = 0
    left_out: str = ""  # forms, and why
    interrupted: bool = False

    def add(self, tried: Tried) -> None:
        """One more run of what was measured before, or a first one."""
        for i, item in enumerate(self.measured):
            if item.settings.title == tried.settings.title:
                self.measured[i] = item.again(tried.runs[0], tried.summaries[0])
                return
        self.measured.append(tried)

    @property
    def best(self) -> Tried | None:
        """The best that was measured; what was only predicted, where nothing was."""
        if self.measured:
            return best_of(self.measured)
        return max(self.predicted, key=lambda item: item.rank, default=None)


class Tuner:
    """One model on this machine with one load."""

    def __init__(self, wish: Wish, log: Log) -> None:
        need_optuna()
        self._wish = wish
        self._log = log
        self._base = EngineConfig.of(**wish.given)
        self._opened = open_model(self._base)
        self._device = choose_device(self._base.model).type
        self._requests = wish.load.requests(self._opened.card, log)
        self._weights: tuple[str, Loaded] | None = None  # of one format at a time
        self._steps: dict[str, Steps] = {}
        self.found = Tuned()

    @property
    def model(self) -> str:
        return self._opened.files.name

    def run(self) -> Tuned:
        """Search, measure, and say what there is; ctrl-C ends it early."""
        try:
            self._run()
        except KeyboardInterrupt:
            self.found.interrupted = True
        return self.found

    def _run(self) -> None:
        wish, found = self._wish, self.found
        forms = self._forms()
        limits = self._base.limits(self._device)
        start = (limits.max_num_seqs, limits.max_num_batched_tokens)
        space = Space.of(self._device, forms, start)
        search = Search(space, self._predict, start, self._base.model.seed)
        try:
            search.run(wish.num_trials)
        finally:
            found.predicted = search.best(wish.num_finalists)
            found.num_predicted, found.num_pruned = len(search.tried), search.num_pruned
        if not found.predicted:
            raise ConfigError(
                f"none of {wish.num_trials} settings can serve this load: its longest request has "
                f"{longest(self._requests):,} tokens. Raise --trials, or shorten it."
            )
        self._log(f"{found.num_predicted} settings predicted, {found.num_pruned} left out")
        starting = search.tried.get(Settings(forms[0], *start).title)
        finalists = list(found.predicted)
        if starting is not None and starting not in finalists:
            finalists.append(starting)  # what it is to be better than
        # Those with the same weights one after the other.
        finalists.sort(key=lambda each: each.settings.form.name)
        self._measure_in_turns([item.settings for item in finalists])
        if wish.speculate and found.best is not None:
            settled = found.best.settings
            self._measure_in_turns([settled, *(settled.guessing(spec) for spec in SPECS)])

    def _measure_in_turns(self, settings: list[Settings]) -> None:
        """There and back again, so that what disturbs one turn meets all, and few weights are loaded."""
        for turn in range(self._wish.num_runs):
            for each in settings if turn % 2 == 0 else reversed(settings):
                self._measure(each)

    def _forms(self) -> tuple[Form, ...]:
        wish = self._wish
        planned = ("quantization", "quantize_head", "kv_cache_dtype", "max_num_seqs", "num_blocks")
        options = {name: value for name, value in wish.given.items() if name not in planned}
        options.pop("max_model_len", None)
        plan = select_quantization(
            **options,
            min_quality=wish.min_quality,
            context=min(longest(self._requests), self._opened.hparams.max_positions),
            concurrency=1,
            formats=wish.formats or ((STORED,) if wish.max_formats == 1 else FORMATS),
            records=wish.records,
        )
        self._refuse_lacking(plan)
        most = len(wish.formats) or wish.max_formats
        forms, self.found.left_out = choose_forms(plan, most, bool(wish.formats))
        if not forms:
            raise ConfigError(f"no form of this model can be tuned: {plan.shortfall}")
        self._log(f"forms: {', '.join(form.name for form in forms)}")
        return self._learned(forms, stored_quality(plan))

    def _refuse_lacking(self, plan: Plan) -> None:
        """A format that was asked for by name and that the model cannot have."""
        for name in self._wish.formats:
            if name in plan.refused:
                raise ConfigError(f"--formats {name}: {plan.refused[name]}.")

    def _learned(self, forms: Sequence[Form], stored: Retention) -> tuple[Form, ...]:
        """What steps of each form cost, and what it keeps of the quality: those that keep enough."""
        tester = Tester(self._wish.given, self._opened, self._device, stored, self._log)
        is_real, good, poor = self._base.model.load_format != "dummy", [], []
        for form in forms:
            config = EngineConfig.of(**{**self._wish.given, **form.options})
            known = form.quality.basis in ("reference", "measured")
            weights = None
            if is_real and not known:
                weights = self._loaded(form, config)
                form = tester.measure(form, weights)
            if not form.quality.meets(self._wish.min_quality):
                poor.append(form)
                continue
            self._steps[form.name] = find_steps(
                config, self._opened, log=self._log, weights=weights
            )
            good.append(form)
        if poor:
            said = ", ".join(f"{form.name} ({form.quality.value:.4f})" for form in poor)
            more = f"measured below --min-quality {self._wish.min_quality:g}: {said}"
            self.found.left_out = "; ".join(filter(None, (self.found.left_out, more)))
        if not good:
            raise ConfigError(f"no form keeps enough of the quality; {self.found.left_out}.")
        release_memory()
        return tuple(good)

    def _predict(self, settings: Settings, share: float) -> Tried:
        """On the simulator, with a share of the blocks that there would be."""
        config = settings.config(self._wish.given)
        limits, steps = config.limits(self._device), self._steps[settings.form.name]
        capacity = steps.capacity(config, self._opened, limits)
        # The longest request that the model takes has room, even if this load has none such.
        whole = -(-context_of(config, self._opened) // capacity.block_size)
        fewer = max(whole, int(share * capacity.num_blocks))
        if fewer < capacity.num_blocks:
            capacity = replace(capacity, num_blocks=fewer)
            settings = replace(settings, num_blocks=capacity.num_blocks)
        run = simulate(
            config,
            limits,
            capacity,
            context_of(config, self._opened),
            steps.costs,
            self._requests,
            self._wish.load.max_concurrency,
            overlap=self._device == "cuda",
        )
        kv_bytes = capacity.num_blocks * capacity.bytes_per_block
        return self._tried(settings, False, run, kv_bytes)

    def _tried(self, settings: Settings, is_measured: bool, run: EngineRun, kv_bytes: int) -> Tried:
        wish = self._wish
        summaries, price = (wish.slo.summarise(run),), wish.price_per_hour
        return Tried(settings, is_measured, (run,), summaries, wish.slo, kv_bytes, price)

    def _measure(self, settings: Settings) -> None:
        """For real, in this process; settings that the engine refuses are left out, and it is said."""
        config = settings.config(self._wish.given)
        try:
            built = build_engine(config, self._opened.source, self._loaded(settings.form, config))
        except EngineError as error:
            self._log(f"{settings.title}: left out: {error}")
            return
        replay(built.engine, _WARM_UP)
        built.engine.reset_prefix_cache()
        at_once = self._wish.load.max_concurrency
        run = replay(built.engine, self._requests, max_concurrency=at_once)
        capacity = built.report.capacity
        kv_bytes = capacity.num_blocks * capacity.bytes_per_block
        tried = self._tried(settings, True, run, kv_bytes)
        kept = "" if tried.is_good else f"; {'; '.join(tried.slo.misses(tried.summary))}"
        self.found.add(tried)
        self._log(f"{settings.title}: {tried.summary.output_throughput:,.1f} tok/s{kept}")
        del built
        release_memory()

    def _loaded(self, form: Form, config: EngineConfig) -> Loaded:
        key = form.weights_key(self._device)
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            checkpoint = open_checkpoint(self._opened.files, config.model)
            self._weights = (key, load_network(config, self._opened.hparams, checkpoint))
        return self._weights[1]
