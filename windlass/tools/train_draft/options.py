"""The options of `windlass train-draft` and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from windlass.config import EngineConfig
from windlass.errors import ConfigError

Kind = Literal["medusa", "eagle"]

DEFAULT_UNROLL = 4
DEFAULT_HEADS = 3
DEFAULT_DRAFT_VOCAB = 8192
DEFAULT_PROMPTS = 2000
_MAX_DRAFT_TOKENS = 16
_MIN_CONTEXT = 32
_MAX_PROMPTS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The flags of the command; None: a default, or unlimited."""

    kind: Kind
    heads: int | None = None  # medusa
    blocks: int | None = None  # medusa
    share_head: bool | None = None  # medusa
    unroll: int | None = None  # eagle
    draft_vocab: int | None = None  # eagle, and medusa with matrices of its own
    prompts: int | None = None
    max_tokens: int = 256
    context: int = 512
    lr: float = 1e-3
    epochs: int = 8
    max_steps: int | None = None
    time_limit: float | None = None
    batch_tokens: int | None = None
    save_every: int = 200
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"--kind must be medusa or eagle, got {self.kind!r}.")
        for name, kind in (
            ("heads", "medusa"),
            ("blocks", "medusa"),
            ("share_head", "medusa"),
            ("unroll", "eagle"),
        ):
            if getattr(self, name) is not None and self.kind != kind:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for --kind {kind}; this is --kind {self.kind}."
                )
        if self.kind == "medusa" and self.draft_vocab is not None and self.shares_head:
            raise ConfigError(
                f"--draft-vocab {self.draft_vocab} needs heads with their own matrices: these heads "
                "share the model's LM head, which has all tokens. Add --no-share-head to train "
                "one per head, or remove --draft-vocab."
            )
        for name in ("heads", "blocks", "unroll"):
            _check_between(name, getattr(self, name), low=1, high=_MAX_DRAFT_TOKENS)
        _check_between("context", self.context, low=_MIN_CONTEXT, high=2**20)
        _check_between("max_tokens", self.max_tokens, low=4, high=self.context - 1)
        _check_between("prompts", self.prompts, low=2, high=_MAX_PROMPTS)
        for name in ("draft_vocab", "epochs", "max_steps", "batch_tokens", "save_every"):
            _check_between(name, getattr(self, name), low=1, high=None)
        if not 0 < self.lr <= 1:
            raise ConfigError(f"--lr must be above 0 and at most 1, got {self.lr:g}.")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ConfigError(f"--time-limit must be above 0 seconds, got {self.time_limit:g}.")

    @property
    def num_draft_tokens(self) -> int:
        if self.kind == "eagle":
            return self.unroll or DEFAULT_UNROLL
        return self.heads or DEFAULT_HEADS

    @property
    def shares_head(self) -> bool:
        return self.share_head is not False

    def draft_vocab_of(self, vocab_size: int) -> int:
        """The size of the head's draft vocabulary; refuses more than the model's."""
        if self.draft_vocab is None:
            return min(DEFAULT_DRAFT_VOCAB, vocab_size) if self.kind == "eagle" else vocab_size
        if self.draft_vocab > vocab_size:
            raise ConfigError(
                f"--draft-vocab {self.draft_vocab} is more than the {vocab_size} tokens of the "
                f"model's vocabulary. Give {vocab_size} or less."
            )
        return self.draft_vocab

    def batch_tokens_on(self, device: str) -> int:
        """Tokens per training step, at least one text."""
        default = 32768 if device == "cuda" else 512
        return max(self.context, self.batch_tokens or default)


@dataclass(frozen=True, slots=True)
class TrainJob:
    """The model, options and files of a training."""

    config: EngineConfig
    options: TrainOptions
    output: Path
    data: Path | None = None  # None: the model generates prompts
    texts: Path | None = None  # None: in DIR.partial, and deleted with it


def _check_between(name: str, value: int | None, low: int, high: int | None) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    expected = f"at least {low}" if high is None else f"between {low} and {high}"
    raise ConfigError(f"--{name.replace('_', '-')} must be {expected}, got {value}.")
