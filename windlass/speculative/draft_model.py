"""Loads a draft model: a smaller model with the same vocabulary and its own weights and KV cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from windlass.config import AUTO, EngineConfig, ModelConfig, SpecConfig
from windlass.core.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError
from windlass.models.card import load_card, load_hparams, open_checkpoint
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles, resolve
from windlass.speculative.auto import detect_method
from windlass.speculative.base import Proposer, SpeculationContext

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled
    from windlass.runner.load import Loaded

_MAX_SHOWN = 5  # differing tokens in an error message


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model whose headers were read, and the config to load it with."""

    config: EngineConfig
    files: ModelFiles
    hparams: HParams


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse an unsuitable draft model before any weight is read."""
    draft = open_draft(config, hparams)
    own = load_card(files, config.model).tokenizer
    compare_vocabularies(own, load_card(draft.files, draft.config.model).tokenizer, config)


def cost_key(config: EngineConfig, hparams: HParams) -> object:
    """Everything that the speed of a draft model depends on: its network and its tensors' formats."""
    draft = open_draft(config, hparams)
    tensors = open_checkpoint(draft.files, draft.config.model)
    stored = sorted((each.shape, each.format) for each in map(tensors.stored, tensors.names()))
    return replace(draft.hparams, source=""), stored


def open_draft(config: EngineConfig, hparams: HParams) -> DraftModel:
    options, model = config.speculation, config.model
    assert options.spec_model is not None  # SpecConfig requires it
    max_model_len = model.max_model_len
    if max_model_len is None or max_model_len == AUTO:
        max_model_len = hparams.max_positions
    own = ModelConfig(
        model=options.spec_model,
        dtype=options.spec_dtype,
        quantization=options.spec_quantization,
        dequantized_copies=False,
        device=model.device,
        load_format="dummy" if model.load_format == "dummy" else "auto",
        download_dir=model.download_dir,
        hf_token=model.hf_token,
        max_model_len=max_model_len,
        seed=model.seed,
        enforce_eager=model.enforce_eager,
        plain_kernels=model.plain_kernels,
        num_threads=model.num_threads,
    )
    try:
        files = resolve(own)
        _refuse_head(files)
        found = load_hparams(files, own)
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model: {error}") from error
    if found.max_positions < max_model_len:
        raise ConfigError(
            f"--spec-model {options.spec_model}: the draft model has {found.max_positions} "
            f"positions, but the target is used with {max_model_len}. Add --max-model-len "
            f"{found.max_positions}, or use another draft model."
        )
    if found.recurrent is not None:
        raise ConfigError(
            f"--spec-model {options.spec_model}: {found.architecture} has recurrent states, which cannot "
            "be rolled back when draft tokens are rejected. Use another draft model."
        )
    if found.mixes_heads:
        raise ConfigError(
            f"--spec-model {options.spec_model}: the layers of {found.architecture} have heads of different "
            "sizes, and so several block tables, which draft models cannot have. Use another draft model."
        )
    return DraftModel(replace(config, model=own, speculation=SpecConfig()), files, found)


def _refuse_head(files: ModelFiles) -> None:
    method = detect_method(files)
    if method != "draft":
        raise ConfigError(
            f"--spec-model {files.path}: is a head, not a model. Use --spec {method}, or --spec "
            "auto."
        )


def compare_vocabularies(own: Tokenizer, other: Tokenizer, config: EngineConfig) -> None:
    """Refuse vocabularies in which an id has different texts. Ids that only one has are ignored."""
    differing = []
    for token in range(min(own.vocab_size, other.vocab_size)):
        ours, theirs = own.token_bytes(token), other.token_bytes(token)
        if ours and theirs and ours != theirs:
            differing.append((token, ours, theirs))
    if differing:
        shown = "; ".join(
            f"{token} is {_quoted(ours)} and {_quoted(theirs)}"
            for token, ours, theirs in differing[:_MAX_SHOWN]
        )
        more = ", ..." if len(differing) > _MAX_SHOWN else ""
        raise ConfigError(
            f"--spec-model {config.speculation.spec_model}: has another vocabulary than "
            f"{config.model.model}: {len(differing):,} tokens differ ({shown}{more}). Use a draft "
            "model of the same family, or --spec self or ngram, which need no draft model."
        )


def _quoted(text: bytes) -> str:
    return repr(text.decode(errors="backslashreplace"))


@dataclass(frozen=True, slots=True)
class DraftModelLoader:
    """The draft model with its weights loaded."""

    context: SpeculationContext
    draft: DraftModel
    loaded: Loaded
    token_bytes: int

    def start(self, made: Assembled) -> Proposer:
        from windlass.speculative.draft_runner import DraftRunnerProposer, open_draft_runner

        draft, context = self.draft, self.context
        draft_runner = open_draft_runner(
            made,
            config=draft.config,
            hparams=draft.hparams,
            loaded=self.loaded,
            limits=context.limits,
        )
        return DraftRunnerProposer(draft_runner, context.hparams.vocab_size)

    def describe(self) -> str:
        count = self.context.config.speculation.max_draft_tokens
        megabytes = self.loaded.weight_bytes / 2**20
        name = self.draft.files.name
        return f"draft model {name} ({megabytes:,.0f} MiB), up to {count} draft tokens"


def open_loader(context: SpeculationContext) -> DraftModelLoader:
    from windlass.models.network import block_size_of, kv_layout
    from windlass.runner.device import kv_dtype
    from windlass.runner.load import load_network

    draft = open_draft(context.config, context.hparams)
    tensors = open_checkpoint(draft.files, draft.config.model)
    try:
        workers = context.loaded.parts.workers
        loaded = load_network(draft.config, draft.hparams, tensors, workers=workers)
    except ConfigError as error:
        # The error must name the flags of the draft model.
        message = re.sub(r"--(?=dtype\b|quantization\b)", "--spec-", str(error))
        raise ConfigError(f"--spec-model {draft.config.model.model}: {message}") from error
    kind = kv_dtype(context.config.cache.kv_cache_dtype) or loaded.parts.dtype
    size = block_size_of(context.config.cache.block_size, context.hparams)
    layout = kv_layout(draft.hparams, size, kind).without_windows()
    return DraftModelLoader(
        context=context, draft=draft, loaded=loaded, token_bytes=layout.token_bytes
    )
