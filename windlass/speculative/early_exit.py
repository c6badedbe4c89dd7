"""Self-speculation: the target's first layers draft, with its own final norm, LM head and KV cache.

Loads no weights, and computes no prompt twice: the target has already written the keys and values of
these layers. The exit layer is chosen at start. The model answers a few texts; for each candidate,
the agreement with the model's own tokens and the time of a step are measured.
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
from windlass.models.decoder import DecoderModel
from windlass.models.hparams import HParams
from windlass.models.network import Network
from windlass.models.source import ModelFiles
from windlass.models.stages import Stage
from windlass.runner.assemble import Assembled
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.draft_runner import DraftRunner, DraftRunnerProposer, open_draft_runner
from windlass.speculative.exits import ExitLayer, candidate_layers, choose_exit

if TYPE_CHECKING:
    from windlass.speculative.exits import Candidate


class SharedKVCache(KVCache):
    """The KV tensors of another cache's first layers. `copy` does nothing: the owner copies blocks."""

    def __init__(self, whole: KVCache, num_layers: int) -> None:
        self._owned = []
        self.layers = whole.layers[:num_layers]


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse an exit layer that the model does not have, before any weight is read."""
    del files
    if hparams.transformers is not None:
        raise ConfigError(
            f"--spec self: {hparams.architecture} runs through transformers' code, which computes all "
            "layers. Use --spec ngram, or a draft model with --spec-model."
        )
    layer = config.speculation.spec_exit_layer
    if hparams.num_layers < 2:
        raise ConfigError("--spec self: the model has one layer, so there is no earlier exit.")
    if layer is not None and layer >= hparams.num_layers:
        raise ConfigError(
            f"--spec-exit-layer must be between 1 and {hparams.num_layers - 1}, since the model has "
            f"{hparams.num_layers} layers; got {layer}."
        )


def first_layers(network: Network, count: int) -> Network:
    """A network of the same modules that uses only the first layers."""
    twin, trunk = _shallow_copy(network), _shallow_copy(cast(nn.Module, network.model))
    trunk.layers = nn.ModuleList(list(cast(nn.ModuleList, trunk.layers))[:count])
    cast(DecoderModel, trunk).stage = Stage(0, count, count)
    twin.model = trunk
    return cast(Network, twin)


def _shallow_copy(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


@dataclass(slots=True)
class EarlyExitLoader:
    """Needs neither weights nor a KV cache of its own."""

    context: SpeculationContext
    token_bytes: int = 0
    chosen: ExitLayer | None = None

    def start(self, made: Assembled) -> Proposer | None:
        context = self.context
        layer = context.config.speculation.spec_exit_layer
        if layer is None:
            self.chosen = choose_exit(context, made, self._candidates)
            layer = self.chosen.layer
        else:
            self.chosen = ExitLayer(layer, "as set")
        if not self.chosen.may_pay:
            return None
        return DraftRunnerProposer(
            self.draft_runner(made, layer, context.limits), context.hparams.vocab_size
        )

    def _candidates(self, made: Assembled, max_rows: int) -> Iterator[Candidate]:
        """Make the runners to measure, one at a time and for few rows, to save capture time and memory."""
        for layer in candidate_layers(self.context.hparams.num_layers):
            few = replace(self.context.limits, max_num_seqs=max_rows)
            yield layer, self.draft_runner(made, layer, few).runner

    def draft_runner(self, made: Assembled, layer: int, limits: Limits) -> DraftRunner:
        """A runner of the first layers, on all ranks at the same time."""
        context, followers = self.context, made.runner.followers
        if followers is not None:
            followers.start_call("exit", str(layer), str(limits.max_num_seqs))
        hparams = replace(
            context.hparams,
            num_layers=layer,
            sliding_windows=context.hparams.sliding_windows[:layer],
        )
        made_runner = open_draft_runner(
            made,
            config=replace(context.config, speculation=SpecConfig()),
            hparams=hparams,
            loaded=replace(context.loaded, network=first_layers(context.loaded.network, layer)),
            limits=limits,
            kv_cache=SharedKVCache(made.cache, layer),
        )
        if followers is not None:
            made_runner.runner.lead(followers.for_runner(layer))
        return made_runner

    def describe(self) -> str:
        count = self.context.config.speculation.max_draft_tokens
        num_layers = self.context.hparams.num_layers
        chosen = self.chosen
        layers = f"{chosen.layer} of {num_layers} layers ({chosen.reason})" if chosen else "layers"
        return f"self, the first {layers}, up to {count} draft tokens"


def open_loader(context: SpeculationContext) -> EarlyExitLoader:
    return EarlyExitLoader(context)
