"""Which file a proposer's name means. A new one is its file and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.speculative.base import ProposerLoader, SpeculationContext
from windlass.speculative.which import settled

# Functions from a Site to a Guide.
_LOADERS = {
    "ngram": "windlass.speculative.ngram:open_loader",
    "lookahead": "windlass.speculative.lookahead:open_loader",
    "draft": "windlass.speculative.draft_model:open_loader",
    "self": "windlass.speculative.early_exit:open_loader",
    "medusa": "windlass.speculative.medusa:open_loader",
    "eagle": "windlass.speculative.eagle:open_loader",
}
# Those that compute guesses one after another: they write to pages past the last known token.
WRITE_AHEAD = ("draft", "self", "eagle")
# Those whose guesses lie on the device, where the next step may begin before the host knows them.
RUN_AHEAD = ("medusa", "eagle")
# Functions that refuse what cannot be, before the target's weights are read.
_CHECKS = {
    "draft": "windlass.speculative.draft_model:check",
    "self": "windlass.speculative.early_exit:check",
    "medusa": "windlass.speculative.heads:check",
    "eagle": "windlass.speculative.heads:check",
}
# Functions that say what decides how long --spec-model takes to guess.
_OUTLINES = {
    "draft": "windlass.speculative.draft_model:outline",
    "medusa": "windlass.speculative.heads:outline",
    "eagle": "windlass.speculative.heads:outline",
}


def settle(config: EngineConfig, files: ModelFiles, hparams: HParams, device: str) -> EngineConfig:
    """The config with one certain way to guess, which fits the model as far as files tell."""
    if config.speculation.spec_alternatives:
        _check_alternatives(config, device)
    config = settled(config)
    where = _CHECKS.get(config.speculation.spec)
    if where is not None:
        _find(where)(config, files, hparams)
    return config


def _check_alternatives(config: EngineConfig, device: str) -> None:
    """Only recorded verifications over pages of plain numbers have places for them."""
    why = None
    if device != "cuda":
        why = f"the engine computes on {device}"
    elif config.model.enforce_eager:
        why = "--enforce-eager records no steps"
    elif config.cache.kv_cache_dtype != "auto":
        why = f"--kv-cache-dtype {config.cache.kv_cache_dtype} keeps codes"
    if why is not None:
        raise ConfigError(
            f"--spec-alternatives {config.speculation.spec_alternatives} needs steps recorded on "
            f"CUDA and a KV cache of plain numbers, but {why}. Leave it out."
        )


def open_loader(context: SpeculationContext) -> ProposerLoader:
    """Load what the wanted proposer needs; one that does not fit the model is refused here."""
    return _find(_LOADERS[context.config.speculation.spec])(context)


def outline(config: EngineConfig, hparams: HParams) -> object:
    """What decides the costs of --spec-model beside the settings; the same in any folder."""
    where = _OUTLINES.get(config.speculation.spec)
    return None if where is None else _find(where)(config, hparams)


def _find(where: str) -> Any:
    module, name = where.split(":")
    return getattr(import_module(module), name)
