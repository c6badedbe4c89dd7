"""MTP: the model's own layer for drafting, which predicts token by token as an EAGLE head does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from windlass.config import EngineConfig
from windlass.core.kv_layout import KVLayout
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.mtp import (
    MTP,
    has_mtp,
    has_own_head,
    mtp_hparams,
    mtp_kv_layout,
    open_mtp,
)
from windlass.models.network import Parts
from windlass.models.source import ModelFiles
from windlass.quant.base import LinearMethod
from windlass.quant.unquantised import Unquantised
from windlass.runner.load import Loaded, make_blueprint
from windlass.speculative.base import SpeculationContext
from windlass.speculative.eagle import DraftHeadLoader

_PLAIN = ("bf16", "f16", "f32")


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse a model without an MTP layer, before any weight is read."""
    if has_mtp(files, config.model, hparams):
        return
    why = (
        f"its files lack the tensors of layer {hparams.num_layers}: the conversion left them out"
        if hparams.num_mtp_layers
        else f"{hparams.source} has no num_nextn_predict_layers"
    )
    raise ConfigError(
        f"--spec mtp: {files.name} ({hparams.architecture}) has no MTP layer: {why}. Use --spec ngram, "
        "or a draft model with --spec-model."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLoader(DraftHeadLoader):
    """The model's own layer."""

    head: MTP

    def layout(self, block_size: int) -> KVLayout:
        parts = self.loaded.parts
        return mtp_kv_layout(self.hparams, block_size, dtype=parts.dtype, mesh=parts.mesh)

    def describe(self) -> str:
        owner = "the model's" if self.head.layer.shared_head.head is None else "its own"
        return f"mtp, up to {self.max_draft_tokens} draft tokens, {owner} LM head"


def open_loader(context: SpeculationContext) -> MTPLoader:
    hparams = mtp_hparams(context.hparams)
    checkpoint = open_mtp(context.files, context.config.model, context.hparams)
    parts = _parts(context, hparams, checkpoint)
    with torch.device("meta"):
        layer = MTP(hparams, parts, own_head=has_own_head(checkpoint, context.hparams))
    load(layer, checkpoint, parts.device)
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    context.loaded.gemm.tune([weight for each in linears for weight in each.plain_weights])
    return MTPLoader(
        head=layer,
        hparams=hparams,
        layers=(hparams.num_layers - 1,),  # the target's final hidden states
        max_draft_tokens=context.config.speculation.max_draft_tokens,
        loaded=context.loaded,
        identity="mtp",  # part of the model's own files
    )


def _parts(context: SpeculationContext, hparams: HParams, checkpoint: Checkpoint) -> Parts:
    """The network's choices, with methods for the layer's tensors, and kernels for plain KV."""
    config, loaded = context.config, context.loaded
    plain_kv = replace(config, cache=replace(config.cache, kv_cache_dtype="auto"))
    own = make_blueprint(
        plain_kv,
        hparams,
        checkpoint,
        workers=loaded.parts.workers,
        gemm=loaded.gemm,
        mesh=loaded.parts.mesh,
    ).parts
    return replace(own, method_for=_method_for(own, loaded, hparams=hparams, checkpoint=checkpoint))


def _method_for(
    own: Parts, loaded: Loaded, hparams: HParams, checkpoint: Checkpoint
) -> Callable[[str, Iterable[str]], LinearMethod]:
    """The methods of the checkpoint's format. eh_proj and the head are unquantised, even if the checkpoint's
    config does not list them."""
    plain, names = Unquantised(own.dtype, loaded.gemm), checkpoint.names()

    def method_for(prefix: str, parts: Iterable[str]) -> LinearMethod:
        parts = list(parts)
        if parts == ["head"] or (parts == ["eh_proj"] and hparams.quantization):
            name = f"{prefix}{parts[0]}.weight"
            if name in names and checkpoint.stored(name).format in _PLAIN:
                return plain
        return own.method_for(prefix, parts)

    return method_for
