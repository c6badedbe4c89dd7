"""Self-speculation: the target's first layers guess, with its own norm, head and pages.

Nothing is loaded and nothing is computed twice: the keys and values of those layers are where the
target wrote them. Where to leave is measured at start: on the model's own answers to a few texts,
how often each exit says what the whole model says, and what a step of it costs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from torch import nn

from windlass.config import EngineConfig, Limits, SpecConfig
from windlass.errors import ConfigError
from windlass.kernels.batch import KVCache
from windlass.models.hparams import HParams
from windlass.models.network import Network
from windlass.models.source import ModelFiles
from windlass.runner.assemble import Assembled
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.draft_runner import DraftRunner, DraftRunnerProposer, open_draft_runner
from windlass.speculative.exits import Exit, best_exit, candidates

if TYPE_CHECKING:
    from windlass.speculative.exits import Tried


class SharedPages(KVCache):
    """The pages of another cache's first layers. Whoever owns them copies blocks."""

    def __init__(self, whole: KVCache, num_layers: int) -> None:
        self._owned = []
        self.layers = whole.layers[:num_layers]


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse an exit that the model does not have, before any weight is read."""
    del files
    wish = config.speculation.spec_exit_layer
    if hparams.num_layers < 2:
        raise ConfigError("--spec self: the model has one layer, so there is no earlier exit.")
    if wish is not None and wish >= hparams.num_layers:
        raise ConfigError(
            f"--spec-exit-layer must be between 1 and {hparams.num_layers - 1}, since the model has "
            f"{hparams.num_layers} layers; got {wish}."
        )


def first_layers(network: Network, count: int) -> Network:
    """The same modules, of which only the first layers are in use."""
    twin, trunk = _twin(network), _twin(cast(nn.Module, network.model))
    trunk.layers = nn.ModuleList(list(cast(nn.ModuleList, trunk.layers))[:count])
    twin.model = trunk
    return cast(Network, twin)


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


@dataclass(slots=True)
class EarlyExitLoader:
    """Needs neither weights nor pages of its own."""

    context: SpeculationContext
    token_bytes: int = 0
    chosen: Exit | None = None

    def start(self, made: Assembled) -> Proposer | None:
        context = self.context
        wish = context.config.speculation
        layer = wish.spec_exit_layer
        if layer is None:
            self.chosen = best_exit(context, made, self._tried)
            layer = self.chosen.layer
        else:
            self.chosen = Exit(layer, "as set")
        if not self.chosen.pays:
            return None
        return DraftRunnerProposer(
            self._draft_runner(made, layer, context.limits), context.hparams.vocab_size
        )

    def _tried(self, made: Assembled, most_rows: int) -> Iterator[Tried]:
        """One after another, each for few rows: recordings take time and memory."""
        for layer in candidates(self.context.hparams.num_layers):
            few = replace(self.context.limits, max_num_seqs=most_rows)
            yield layer, self._draft_runner(made, layer, few).runner

    def _draft_runner(self, made: Assembled, layer: int, limits: Limits) -> DraftRunner:
        context = self.context
        config = replace(context.config, speculation=SpecConfig())
        hparams = replace(
            context.hparams,
            num_layers=layer,
            sliding_windows=context.hparams.sliding_windows[:layer],
        )
        loaded = replace(context.loaded, network=first_layers(context.loaded.network, layer))
        return open_draft_runner(
            made, config, hparams, loaded, limits, SharedPages(made.cache, layer)
        )

    def describe(self) -> str:
        most, layers = (
            self.context.config.speculation.max_draft_tokens,
            self.context.hparams.num_layers,
        )
        chosen = self.chosen
        where = f"{chosen.layer} of {layers} layers ({chosen.reason})" if chosen else "its layers"
        return f"self, the first {where}, up to {most} guesses"


def open_loader(context: SpeculationContext) -> EarlyExitLoader:
    return EarlyExitLoader(context)
