"""Builds a scorer: a runner that scores given tokens, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.build_rank import Source
from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.models.card import open_checkpoint

if TYPE_CHECKING:
    from windlass.runner.load import Loaded
    from windlass.runner.scoring import Scorer, ScoringLimits


@dataclass(frozen=True, slots=True)
class BuiltScorer:
    """A scorer and its network, whose weights another scorer or engine may share."""

    scorer: Scorer
    weights: Loaded
    choices: list[Choice]
    memory: dict[str, int]


def build_scorer(
    config: EngineConfig, source: Source, limits: ScoringLimits, weights: Loaded | None = None
) -> BuiltScorer:
    """Build a scorer of given tokens, with a KV cache for one group. `weights`: share them."""
    from windlass.runner.assemble import make_runner
    from windlass.runner.device import choose_device
    from windlass.runner.load import kv_format_of, load_network
    from windlass.runner.scoring import Scorer

    if config.parallel.num_ranks > 1:
        raise ConfigError("tokens are scored on one device. Leave out --tensor-parallel-size.")
    config = replace(
        config,
        model=replace(config.model, enforce_eager=True),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=limits.rows,
            max_num_batched_tokens=max(limits.step_tokens, limits.rows),
        ),
    )
    checkpoint = open_checkpoint(source.files, config.model)
    weights = load_network(config, source.hparams, checkpoint, weights=weights)
    layout = kv_format_of(config, source.hparams, weights.parts).layout.without_windows()
    cache = replace(config.cache, num_blocks=limits.num_blocks(layout))
    config = replace(config, cache=cache)
    steps = config.limits(choose_device(config.model).type)
    made = make_runner(config, source.hparams, loaded=weights, limits=steps, one_table=True)
    scorer = Scorer(
        runner=made.runner,
        network=weights.network,
        limits=limits,
        layout=layout,
        vocab_size=source.hparams.vocab_size,
    )
    choices = [*weights.choices, made.kv_format.choice]
    return BuiltScorer(scorer=scorer, weights=weights, choices=choices, memory=made.memory)
