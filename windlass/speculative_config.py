"""The settings of speculation, and which of them go together. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import DType, Quantization, at_least, flag, option

SpecName = Literal["none", "auto", "ngram", "lookahead", "draft", "self", "medusa", "eagle"]
Acceptance = Literal["exact", "typical"]

MAX_SPEC_TOKENS = 64
_MOST_ALTERNATIVES = 3
_GUESSES = {"draft": 5, "self": 4, "medusa": 3, "eagle": 4}  # where it is not said; others 8
_HEADS = ("medusa", "eagle")
# Settings that only some ways to guess read; others are for all.
_READ_BY: dict[str, tuple[str, ...]] = {
    "spec_model": ("auto", "draft", *_HEADS),
    "spec_quantization": ("auto", "draft"),
    "spec_dtype": ("auto", "draft"),
    "spec_alternatives": ("auto", "medusa"),
    "spec_exit_layer": ("self",),
    "spec_ngram_min": ("auto", "ngram"),
    "spec_ngram_max": ("auto", "ngram"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Guessing the next tokens, several of which one step verifies."""

    spec: SpecName = option(
        "none",
        "How to guess the next tokens: ngram takes what followed the same words before, lookahead "
        "what the model said after wrong guesses, draft is a smaller model, self the model's own "
        "first layers, medusa and eagle are heads trained for it, auto chooses. The output stays "
        "the same.",
        "--spec-method",
    )
    spec_model: str | None = option(
        None,
        "What guesses: a medusa or eagle head, or a model with the same vocabulary; folder, hub id, "
        "or .gguf file.",
    )
    spec_tokens: int | None = option(
        None, "Most guesses of a request in a step, 1 to 64; default: 8, of models and heads fewer."
    )
    spec_alternatives: int = option(
        0,
        "medusa on CUDA: other tokens that are tried in the place of the first guess, 0 to 3, while "
        "few requests run.",
    )
    spec_ngram_min: int = option(2, "ngram: the fewest tokens that must be the same.")
    spec_ngram_max: int = option(4, "ngram: the most tokens that are compared.")
    spec_quantization: Quantization | None = option(
        None, "draft: round its 16-bit weights to this while they are loaded."
    )
    spec_dtype: DType = option("auto", "draft: its arithmetic.")
    spec_exit_layer: int | None = option(
        None, "self: how many of the first layers guess; default: what is measured at start."
    )
    spec_acceptance: Acceptance = option(
        "exact",
        "Which guesses are kept: those that the model samples itself, or with typical also likely "
        "ones, which changes the distribution of what is sampled (CPU).",
    )
    spec_threshold: float | None = option(
        None, "typical: how likely, above 0, at most 1; lower keeps more; default: 0.9."
    )

    @property
    def max_draft_tokens(self) -> int:
        """Of a request in a step."""
        return self.spec_tokens or _GUESSES.get(self.spec, 8)

    @property
    def threshold(self) -> float | None:
        """Of typical acceptance; None: guesses are kept as sampled."""
        return (self.spec_threshold or 0.9) if self.spec_acceptance == "typical" else None

    def __post_init__(self) -> None:
        if self.spec == "none":
            for item in fields(self):
                if item.name != "spec" and getattr(self, item.name) != item.default:
                    raise ConfigError(
                        f"{flag(item.name)} does nothing without speculation. Add --spec ngram."
                    )
        self._check_numbers()
        self._check_readers()
        if self.spec in _HEADS and self.spec_model is None:
            raise ConfigError(
                f"--spec {self.spec} needs a head: give its folder with --spec-model. "
                f"windlass train-draft MODEL --kind {self.spec} makes one."
            )
        if self.spec == "draft" and self.spec_model is None:
            raise ConfigError(
                "--spec draft needs a model: give one that is smaller and has the same vocabulary "
                "with --spec-model."
            )

    def _check_numbers(self) -> None:
        if self.spec_tokens is not None and not 1 <= self.spec_tokens <= MAX_SPEC_TOKENS:
            raise ConfigError(
                f"--spec-tokens must be between 1 and {MAX_SPEC_TOKENS}, got {self.spec_tokens}: "
                "no guesses are --spec none, and the chance that so long a guess is right pays "
                "for no step that verifies it."
            )
        if not 0 <= self.spec_alternatives <= _MOST_ALTERNATIVES:
            raise ConfigError(
                f"--spec-alternatives must be between 0 and {_MOST_ALTERNATIVES}, got "
                f"{self.spec_alternatives}."
            )
        at_least(self, 1, "spec_ngram_min", "spec_exit_layer")
        if self.spec_ngram_max < self.spec_ngram_min:
            raise ConfigError(
                f"--spec-ngram-max ({self.spec_ngram_max}) is below --spec-ngram-min "
                f"({self.spec_ngram_min}): there is no length to compare."
            )
        if self.spec_threshold is None:
            return
        if self.spec_acceptance != "typical":
            raise ConfigError("--spec-threshold does nothing without --spec-acceptance typical.")
        if not 0.0 < self.spec_threshold <= 1.0:
            raise ConfigError(
                f"--spec-threshold must be above 0 and at most 1, got {self.spec_threshold:g}."
            )

    def _check_readers(self) -> None:
        """Settings that the chosen way to guess never reads."""
        defaults = {item.name: item.default for item in fields(self)}
        for name, readers in _READ_BY.items():
            if self.spec not in readers and getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{flag(name)} does nothing with --spec {self.spec}; leave it out."
                )
