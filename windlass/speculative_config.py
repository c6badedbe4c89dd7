"""The options of speculative decoding and their checks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import DType, Quantization, at_least, flag, option

SpecName = Literal["none", "auto", "ngram", "lookahead", "draft", "self", "medusa", "eagle", "mtp"]
Acceptance = Literal["exact", "typical"]

MAX_SPEC_TOKENS = 64
_MAX_ALTERNATIVES = 3
_DEFAULT_TOKENS = {"draft": 5, "self": 4, "medusa": 3, "eagle": 4, "mtp": 3}  # other methods: 8
_HEADS = ("medusa", "eagle")
# Options that only some methods read; all methods read the others.
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
    """Speculative decoding: a proposer drafts several tokens, and one step verifies them."""

    spec: SpecName = option(
        "none",
        "Speculative decoding method: ngram copies what followed the same n-gram before, lookahead "
        "reuses samples after rejected draft tokens, draft runs a smaller model, self the model's "
        "first layers, medusa and eagle run heads trained for the model, mtp the model's own layer "
        "for drafting, auto chooses. The output stays the same.",
        "--spec-method",
    )
    spec_enabled: bool = option(
        True, "Make draft tokens; --no-spec-enabled loads the method without using it.", live=True
    )
    spec_model: str | None = option(
        None,
        "Draft model with the same vocabulary, or medusa or eagle head: folder, hub id, or .gguf "
        "file.",
    )
    spec_tokens: int | None = option(
        None,
        "Maximum draft tokens per request and step, 1 to 64; default: 8, draft 5, self and eagle "
        "4, medusa and mtp 3.",
        live=True,
    )
    spec_alternatives: int = option(
        0,
        "medusa on CUDA: number of alternatives to the first draft token to verify, 0 to 3, while "
        "few requests run.",
    )
    spec_ngram_min: int = option(2, "ngram: minimum n-gram length to match.")
    spec_ngram_max: int = option(4, "ngram: maximum n-gram length to match.")
    spec_quantization: Quantization | None = option(
        None, "draft: quantise its 16-bit weights to this while loading."
    )
    spec_dtype: DType = option("auto", "draft: its dtype.")
    spec_exit_layer: int | None = option(
        None, "self: number of first layers that draft; default: measured at start."
    )
    spec_acceptance: Acceptance = option(
        "exact",
        "exact accepts draft tokens that equal the model's samples; typical also accepts likely "
        "ones, which changes the output distribution.",
    )
    spec_threshold: float | None = option(
        None,
        "typical: acceptance threshold, above 0, at most 1; lower accepts more; default: 0.9.",
    )

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens per request and step."""
        return self.spec_tokens or _DEFAULT_TOKENS.get(self.spec, 8)

    @property
    def threshold(self) -> float | None:
        """The threshold of typical acceptance; None: exact acceptance."""
        return (self.spec_threshold or 0.9) if self.spec_acceptance == "typical" else None

    @property
    def embeds_drafts(self) -> bool:
        """Whether the proposer embeds its draft tokens with the target's embedding."""
        return self.spec in ("eagle", "mtp")

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
                f"windlass train-draft MODEL --kind {self.spec} trains one."
            )
        if self.spec == "draft" and self.spec_model is None:
            raise ConfigError(
                "--spec draft needs a model: give a smaller model with the same vocabulary with "
                "--spec-model."
            )

    def _check_numbers(self) -> None:
        if self.spec_tokens is not None and not 1 <= self.spec_tokens <= MAX_SPEC_TOKENS:
            raise ConfigError(
                f"--spec-tokens must be between 1 and {MAX_SPEC_TOKENS}, got {self.spec_tokens}: "
                "for no draft tokens use --spec none, and longer drafts are never accepted often "
                "enough to pay for their verification."
            )
        if not 0 <= self.spec_alternatives <= _MAX_ALTERNATIVES:
            raise ConfigError(
                f"--spec-alternatives must be between 0 and {_MAX_ALTERNATIVES}, got "
                f"{self.spec_alternatives}."
            )
        at_least(self, 1, "spec_ngram_min", "spec_exit_layer")
        if self.spec_ngram_max < self.spec_ngram_min:
            raise ConfigError(
                f"--spec-ngram-max ({self.spec_ngram_max}) is below --spec-ngram-min "
                f"({self.spec_ngram_min}): there is no n-gram length to match."
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
        """Refuse options that the chosen method does not read."""
        defaults = {item.name: item.default for item in fields(self)}
        for name, readers in _READ_BY.items():
            if self.spec not in readers and getattr(self, name) != defaults[name]:
                raise ConfigError(f"{flag(name)} does nothing with --spec {self.spec}; remove it.")
