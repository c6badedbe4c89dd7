"""`windlass tune` as a whole: forms that are good enough, a search on the simulator, the best measured.

Engines that hold their weights alike share them: only a new format is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, EngineError
from windlass.models.card import open_checkpoint
from windlass.runner.assemble import load_network
from windlass.runner.device import choose_device
from windlass.tools.bench.device import release_memory
from windlass.tools.plan.formats import FORMATS, STORED
from windlass.tools.plan.jobs import Load, longest
from windlass.tools.plan.replay import Job, RealClock, Replay, Replayed
from windlass.tools.plan.select import select_quantization
from windlass.tools.plan.simulate import simulate
from windlass.tools.plan.slo import Slo
from windlass.tools.plan.steps import Steps, context_of, find_steps
from windlass.tools.tune.search import Search, need_optuna
from windlass.tools.tune.space import SPECS, Form, Settings, Space, choose_forms
from windlass.tools.tune.tried import Tried

if TYPE_CHECKING:
    from windlass.runner.assemble import Loaded

Say = Callable[[str], None]
_WARM_UP = (Job([1] * 32, 4),) * 2


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

    @property
    def best(self) -> Tried | None:
        """The best that was measured; what was only predicted, where nothing was."""
        return max(self.measured or self.predicted, key=lambda item: item.rank, default=None)


class Tuner:
    """One model on this machine with one load."""

    def __init__(self, wish: Wish, say: Say) -> None:
        need_optuna()
        self._wish = wish
        self._say = say
        self._base = EngineConfig.of(**wish.given)
        self._opened = open_model(self._base)
        self._device = choose_device(self._base.model).type
        self._jobs = wish.load.jobs(self._opened.card, say)
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
        for form in forms:
            self._learn(form)
        search = Search(space, self._predict, start, self._base.model.seed)
        try:
            search.run(wish.num_trials)
        finally:
            found.predicted = search.best(wish.num_finalists)
            found.num_predicted, found.num_pruned = len(search.tried), search.num_pruned
        if not found.predicted:
            raise ConfigError(
                f"none of {wish.num_trials} settings can serve this load: its longest request has "
                f"{longest(self._jobs):,} tokens. Raise --trials, or shorten it."
            )
        self._say(f"{found.num_predicted} settings predicted, {found.num_pruned} left out")
        starting = search.tried.get(Settings(forms[0], *start).title)
        finalists = list(found.predicted)
        if starting is not None and starting not in finalists:
            finalists.append(starting)  # what it is to be better than
        # Those with the same weights one after the other.
        for item in sorted(finalists, key=lambda each: each.settings.form.name):
            self._measure(item.settings)
        if wish.speculate and found.best is not None:
            settled = found.best.settings
            for spec in SPECS:
                self._measure(settled.guessing(spec))

    def _forms(self) -> tuple[Form, ...]:
        wish = self._wish
        planned = ("quantization", "quantize_head", "kv_cache_dtype", "max_num_seqs", "num_blocks")
        options = {name: value for name, value in wish.given.items() if name not in planned}
        options.pop("max_model_len", None)
        plan = select_quantization(
            **options,
            min_quality=wish.min_quality,
            context=min(longest(self._jobs), self._opened.spec.max_positions),
            concurrency=1,
            formats=(STORED,) if wish.max_formats == 1 else FORMATS,
            records=wish.records,
        )
        forms, self.found.left_out = choose_forms(plan, wish.max_formats)
        if not forms:
            raise ConfigError(f"no form of this model can be tuned: {plan.shortfall}")
        self._say(f"forms: {', '.join(form.name for form in forms)}")
        return forms

    def _learn(self, form: Form) -> None:
        """What steps of a form cost: kept from before, or measured with its weights."""
        config = EngineConfig.of(**{**self._wish.given, **form.options})
        self._steps[form.name] = find_steps(config, self._opened, say=self._say)

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
            self._jobs,
            self._wish.load.max_concurrency,
            overlap=self._device == "cuda",
        )
        kv_bytes = capacity.num_blocks * capacity.bytes_per_block
        return self._tried(settings, False, run, kv_bytes)

    def _tried(self, settings: Settings, is_measured: bool, run: Replayed, kv_bytes: int) -> Tried:
        wish = self._wish
        summary = wish.slo.summarise(run)
        return Tried(settings, is_measured, run, summary, wish.slo, kv_bytes, wish.price_per_hour)

    def _measure(self, settings: Settings) -> None:
        """For real, in this process; settings that the engine refuses are left out, and it is said."""
        config = settings.config(self._wish.given)
        try:
            built = build_engine(config, self._opened.source, self._loaded(settings, config))
        except EngineError as error:
            self._say(f"{settings.title}: left out: {error}")
            return
        Replay(built.engine, _WARM_UP, RealClock()).run()
        built.engine.reset_prefix_cache()
        clock, at_once = RealClock(), self._wish.load.max_concurrency
        run = Replay(built.engine, self._jobs, clock, at_once).run()
        capacity = built.report.capacity
        kv_bytes = capacity.num_blocks * capacity.bytes_per_block
        tried = self._tried(settings, True, run, kv_bytes)
        self.found.measured.append(tried)
        kept = "" if tried.is_good else f"; {'; '.join(tried.slo.misses(tried.summary))}"
        self._say(f"{settings.title}: {tried.summary.output_throughput:,.1f} tok/s{kept}")
        del built
        release_memory()

    def _loaded(self, settings: Settings, config: EngineConfig) -> Loaded:
        key = settings.form.weights_key(self._device)
        if self._weights is None or self._weights[0] != key:
            self._weights = None
            checkpoint = open_checkpoint(self._opened.files, config.model)
            self._weights = (key, load_network(config, self._opened.spec, checkpoint))
        return self._weights[1]
