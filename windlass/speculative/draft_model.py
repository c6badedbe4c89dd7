"""A draft model: a smaller one with the same vocabulary, whose weights and pages are its own."""

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
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.which import kind_of

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, Loaded

_SHOWN = 5  # tokens that differ, in an error


@dataclass(frozen=True, slots=True)
class Draft:
    """A model whose headers were read, and the config that it is loaded with."""

    config: EngineConfig
    files: ModelFiles
    hparams: HParams


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse a model that cannot guess for this one, before any weight is read."""
    draft = open_draft(config, hparams)
    own = load_card(files, config.model).tokenizer
    compare(own, load_card(draft.files, draft.config.model).tokenizer, config)


def outline(config: EngineConfig, hparams: HParams) -> object:
    """What decides how long a draft model takes: its network, and how its tensors are stored."""
    draft = open_draft(config, hparams)
    tensors = open_checkpoint(draft.files, draft.config.model)
    stored = sorted((one.shape, one.format) for one in map(tensors.stored, tensors.names()))
    return replace(draft.hparams, source=""), stored


def open_draft(config: EngineConfig, hparams: HParams) -> Draft:
    wish, model = config.speculation, config.model
    assert wish.spec_model is not None  # SpecConfig asks for it
    longest = model.max_model_len
    if longest is None or longest == AUTO:
        longest = hparams.max_positions
    own = ModelConfig(
        model=wish.spec_model,
        dtype=wish.spec_dtype,
        quantization=wish.spec_quantization,
        device=model.device,
        load_format="dummy" if model.load_format == "dummy" else "auto",
        download_dir=model.download_dir,
        hf_token=model.hf_token,
        max_model_len=longest,
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
    if found.max_positions < longest:
        raise ConfigError(
            f"--spec-model {wish.spec_model}: knows {found.max_positions} positions, and the model "
            f"that it is to guess for is used with {longest}. Add --max-model-len "
            f"{found.max_positions}, or take another draft model."
        )
    return Draft(replace(config, model=own, speculation=SpecConfig()), files, found)


def _refuse_head(files: ModelFiles) -> None:
    kind = kind_of(files)
    if kind != "draft":
        raise ConfigError(
            f"--spec-model {files.path}: is a head, not a model. Use --spec {kind}, or --spec auto."
        )


def compare(own: Tokenizer, other: Tokenizer, config: EngineConfig) -> None:
    """The same ids must mean the same text; ids that only one of them has do not matter."""
    differing = []
    for token in range(min(own.vocab_size, other.vocab_size)):
        ours, theirs = own.token_bytes(token), other.token_bytes(token)
        if ours and theirs and ours != theirs:
            differing.append((token, ours, theirs))
    if differing:
        shown = "; ".join(
            f"{token} is {_quoted(ours)} and {_quoted(theirs)}"
            for token, ours, theirs in differing[:_SHOWN]
        )
        more = ", ..." if len(differing) > _SHOWN else ""
        raise ConfigError(
            f"--spec-model {config.speculation.spec_model}: has another vocabulary than "
            f"{config.model.model}: {len(differing):,} tokens differ ({shown}{more}). Take a draft "
            "model of the same family, or --spec self or ngram, which need none."
        )


def _quoted(text: bytes) -> str:
    return repr(text.decode(errors="backslashreplace"))


@dataclass(frozen=True, slots=True)
class DraftModelLoader:
    """The draft model with its weights in place."""

    context: SpeculationContext
    draft: Draft
    loaded: Loaded
    token_bytes: int

    def start(self, made: Assembled) -> Proposer:
        from windlass.speculative.draft_runner import DraftRunnerProposer, open_draft_runner

        draft, context = self.draft, self.context
        draft_runner = open_draft_runner(
            made, draft.config, draft.hparams, self.loaded, context.limits
        )
        return DraftRunnerProposer(draft_runner, context.hparams.vocab_size)

    def describe(self) -> str:
        most = self.context.config.speculation.max_draft_tokens
        megabytes = self.loaded.weight_bytes / 2**20
        return f"draft model {self.draft.files.name} ({megabytes:,.0f} MiB), up to {most} guesses"


def open_loader(context: SpeculationContext) -> DraftModelLoader:
    from windlass.kernels.batch import kv_token_bytes
    from windlass.runner.assemble import load_network
    from windlass.runner.device import kv_dtype

    draft = open_draft(context.config, context.hparams)
    tensors = open_checkpoint(draft.files, draft.config.model)
    try:
        loaded = load_network(draft.config, draft.hparams, tensors)
    except ConfigError as error:
        # By the names of the flags that were given for it.
        told = re.sub(r"--(?=dtype\b|quantization\b)", "--spec-", str(error))
        raise ConfigError(f"--spec-model {draft.config.model.model}: {told}") from error
    kind = kv_dtype(context.config.cache.kv_cache_dtype) or loaded.parts.dtype
    shape = (draft.hparams.num_layers, draft.hparams.num_kv_heads, draft.hparams.head_dim)
    return DraftModelLoader(context, draft, loaded, kv_token_bytes(*shape, kind))
