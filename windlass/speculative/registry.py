"""Maps a `--spec` name to its proposer. A new proposer needs its file and a line here."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.speculative.auto import resolve_auto
from windlass.speculative.base import ProposerLoader, SpeculationContext

# Functions from a SpeculationContext to a ProposerLoader.
_LOADERS = {
    "ngram": "windlass.speculative.ngram:open_loader",
    "lookahead": "windlass.speculative.lookahead:open_loader",
    "draft": "windlass.speculative.draft_model:open_loader",
    "self": "windlass.speculative.early_exit:open_loader",
    "medusa": "windlass.speculative.medusa:open_loader",
    "eagle": "windlass.speculative.eagle:open_loader",
    "mtp": "windlass.speculative.mtp:open_loader",
}
# Methods that draft autoregressively: they write KV past the last known token.
WRITES_KV_AHEAD = ("draft", "self", "eagle", "mtp")
# Methods whose drafts stay on the device, so that the next step can be pre-launched.
PRELAUNCHES = ("medusa", "eagle", "mtp")
# Methods that compute with the target's network, on every rank. All other methods run on rank 0.
ON_EVERY_RANK = ("self", *PRELAUNCHES)
# Functions that refuse an unusable --spec-model or option before the target's weights are read.
_CHECKS = {
    "draft": "windlass.speculative.draft_model:check",
    "self": "windlass.speculative.early_exit:check",
    "medusa": "windlass.speculative.heads:check",
    "eagle": "windlass.speculative.heads:check",
    "mtp": "windlass.speculative.mtp:check",
}
# Functions that return what decides the drafting cost of --spec-model.
_COST_KEYS = {
    "draft": "windlass.speculative.draft_model:cost_key",
    "medusa": "windlass.speculative.heads:cost_key",
    "eagle": "windlass.speculative.heads:cost_key",
}


def resolve_method(
    config: EngineConfig, files: ModelFiles, hparams: HParams, device: str
) -> EngineConfig:
    """Replace auto by a method, and check that the method fits the model as far as files show."""
    if config.speculation.spec_alternatives:
        _check_alternatives(config, device)
    config = resolve_auto(config, partial(_has_mtp, config, files, hparams))
    if config.speculation.spec != "none" and hparams.recurrent is not None:
        raise ConfigError(
            f"--spec {config.speculation.spec}: {hparams.architecture} has recurrent states, which cannot "
            "be rolled back when draft tokens are rejected. Use --spec none."
        )
    if config.speculation.spec != "none" and hparams.mixes_heads:
        raise ConfigError(
            f"--spec {config.speculation.spec}: the layers of {hparams.architecture} have heads of different "
            "sizes, and so several block tables, which verification does not support. Use --spec none."
        )
    path = _CHECKS.get(config.speculation.spec)
    if path is not None:
        _import(path)(config, files, hparams)
    return config


def _has_mtp(config: EngineConfig, files: ModelFiles, hparams: HParams) -> bool:
    found: bool = _import("windlass.models.mtp:has_mtp")(files, config.model, hparams)
    return found


def _check_alternatives(config: EngineConfig, device: str) -> None:
    """Only captured verifications with an unquantised KV cache support sibling tokens."""
    why = None
    if device != "cuda":
        why = f"the engine computes on {device}"
    elif config.model.enforce_eager:
        why = "--enforce-eager disables CUDA graphs"
    elif config.cache.kv_cache_dtype != "auto":
        why = f"--kv-cache-dtype {config.cache.kv_cache_dtype} quantises the KV cache"
    if why is not None:
        raise ConfigError(
            f"--spec-alternatives {config.speculation.spec_alternatives} needs captured CUDA graphs "
            f"and an unquantised KV cache, but {why}. Remove the flag."
        )


def open_loader(context: SpeculationContext) -> ProposerLoader:
    """Load the weights of the chosen proposer; raises if they do not fit the model."""
    return _import(_LOADERS[context.config.speculation.spec])(context)


def cost_key(config: EngineConfig, hparams: HParams) -> object:
    """Everything but the settings that the costs of --spec-model depend on; independent of its path."""
    path = _COST_KEYS.get(config.speculation.spec)
    return None if path is None else _import(path)(config, hparams)


def _import(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)
