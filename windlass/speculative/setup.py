"""Assembles the runner's side of speculation: the proposer with its weights, its measured costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from windlass.config import EngineConfig, Limits
from windlass.core.card import Capacity, Choice
from windlass.core.speculation.costs import Costs
from windlass.core.speculation.facts import ProposerTraits, SpeculationFacts
from windlass.measurement_cache import MeasurementCache
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.speculative.base import (
    DrafterLoader,
    Proposer,
    ProposerLoader,
    SpeculationContext,
)
from windlass.speculative.early_exit import EarlyExitLoader
from windlass.speculative.measure import MeasureLimits, measure, spot_check
from windlass.speculative.measurement_cache import (
    machine_load,
    open_measurement_cache,
)
from windlass.speculative.registry import (
    ON_EVERY_RANK,
    PRELAUNCHES,
    WRITES_KV_AHEAD,
    cost_key,
    open_loader,
)
from windlass.speculative.runner import SpeculativeRunner

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, DrafterKV
    from windlass.runner.load import Loaded
    from windlass.runner.runner import Runner
    from windlass.runner.worker import Worker


_MAX_DISAGREEMENT = (
    1.2  # measure again if cached and observed costs differ by more than this factor
)


@dataclass(frozen=True, slots=True)
class StartedSpeculation:
    """A runner that drafts, and the facts for the governor; None: it never drafts."""

    runner: Runner | SpeculativeRunner
    choice: Choice
    facts: SpeculationFacts | None = None


class SpeculationSetup:
    """A proposer with its weights loaded, before its KV cache and the runner exist."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, hparams: HParams, loaded: Loaded
    ) -> None:
        self._config = config
        parts = loaded.parts
        self._cache = open_measurement_cache(
            config,
            files,
            hparams=hparams,
            device=parts.device,
            folder="speculation",
            backend=parts.ops.backend,
            proposer=cost_key(config, hparams),
        )
        self._costs_name = f"costs at load {machine_load()}"
        context = SpeculationContext(
            config=config, files=files, hparams=hparams, loaded=loaded, cache=self._cache
        )
        self._loader = open_loader(context)
        self.token_bytes = self._loader.token_bytes
        options = config.speculation
        if loaded.parts.device.type == "cpu":
            self.lookahead = options.max_draft_tokens if options.spec in WRITES_KV_AHEAD else 0
            self.lookahead_after_drafts = 0
        else:
            # A captured decode step takes a new block for the block of its own position, so no
            # block may come early. Verifications take any block, and those of heads are pre-launched.
            self.lookahead = 0
            self.lookahead_after_drafts = (
                1 + options.max_draft_tokens if options.spec in PRELAUNCHES else 0
            )

    def make_kv(self, capacity: Capacity) -> DrafterKV | None:
        """Allocate the KV cache of a drafter, if it has one."""
        loader = self._loader
        return loader.make_kv(capacity) if isinstance(loader, DrafterLoader) else None

    def start(self, made: Assembled, limits: Limits, requested: str) -> StartedSpeculation:
        """Wrap the runner with speculation; `requested` is the --spec that the user gave.

        Returns the bare runner where drafts would never be profitable.
        """
        options, capacity = self._config.speculation, made.capacity
        measure_limits = MeasureLimits(
            max_positions=made.max_positions_per_step,
            max_rows=limits.max_num_seqs,
            max_row_tokens=min(1 + options.max_draft_tokens, made.max_model_len),
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=made.max_model_len,
        )
        if made.runner.followers is not None and options.spec in ON_EVERY_RANK:
            made.runner.followers.start_call("draft")
        proposer = self._loader.start(made)
        if proposer is None:
            self._cache.save()
            why = f"{requested} was requested and would be slower: {self._loader.describe()}"
            return StartedSpeculation(made.runner, Choice("speculation", "none", why))
        costs, source = self._costs(made, proposer, measure_limits)
        self._cache.save()
        chosen = "as set" if requested != "auto" else f"auto chose {options.spec}"
        parts = [chosen, costs.describe()]
        parts += [source] if source else []
        if costs.never_profitable(options.max_draft_tokens):
            parts.append("drafts would not pay here if all were accepted: only rare trials")
        if options.threshold is not None:
            parts.append(f"typical acceptance at {options.threshold:g} CHANGES THE DISTRIBUTION")
        parts += [self._cache.problem] if self._cache.problem else []
        choice = Choice("speculation", self._loader.describe(), "; ".join(parts))
        facts = SpeculationFacts(
            proposer=ProposerTraits(free=proposer.free, in_step=proposer.in_step),
            costs=costs,
            max_positions_per_step=made.max_positions_per_step,
            max_draft_tokens=options.max_draft_tokens,
            max_drafts_per_row=tuple(
                made.runner.max_draft_tokens(options.max_draft_tokens, num_rows)
                for num_rows in range(1 + limits.max_num_seqs)
            ),
        )
        return StartedSpeculation(SpeculativeRunner(made.runner, proposer), choice, facts)

    def follow(self, made: Assembled, worker: Worker) -> dict[str, Callable[..., None]]:
        """The functions of this proposer that rank 0 calls on other ranks, by name."""
        loader = self._loader
        if not isinstance(loader, EarlyExitLoader):
            return {"draft": partial(_start, loader, made)}

        def add_exit(layer: str, max_rows: str) -> None:
            limits = replace(loader.context.limits, max_num_seqs=int(max_rows))
            worker.add(int(layer), loader.draft_runner(made, int(layer), limits).runner)

        return {"draft": _do_nothing, "exit": add_exit}

    @property
    def check_costs(self) -> Callable[[float], None]:
        """Drops cached costs that running steps disagree with. Keeps the cache alive, not the setup."""
        return partial(_check_cached_costs, self._cache, self._costs_name)

    def _costs(
        self, made: Assembled, proposer: Proposer, limits: MeasureLimits
    ) -> tuple[Costs, str]:
        """Take the costs of an earlier start if a spot check agrees; else measure."""
        name, source = self._costs_name, ""
        size = [limits.max_positions, limits.max_rows, limits.max_row_tokens]
        known = self._cache.get(name)
        if known is not None:
            try:
                if known["room"] == size:
                    costs = Costs.from_json(known["found"])
                    factor = spot_check(made.runner, proposer, limits).disagreement(costs)
                    if factor <= _MAX_DISAGREEMENT:
                        return costs, "measured at an earlier start"
                    source = (
                        f"measured again: costs of an earlier start were off by {factor:.2f} times"
                    )
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._cache.problem = f"cached costs are invalid ({error!r}): measured again"
        costs = measure(made.runner, proposer, limits)
        self._cache.put(name, {"room": size, "found": costs.to_json()})
        return costs, source


def _start(loader: ProposerLoader, made: Assembled) -> None:
    """Attach a drafter to the runner of a rank. Its drafts come in rank 0's plans."""
    loader.start(made)


def _do_nothing() -> None:
    """Early exit has its own call."""


def _check_cached_costs(cache: MeasurementCache, name: str, disagreement: float) -> None:
    """Drop cached costs that running steps disagree with, so that the next start measures."""
    if disagreement > _MAX_DISAGREEMENT and cache.get(name) is not None:
        cache.drop(name)
        cache.save()
