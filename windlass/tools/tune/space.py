"""Points of the search space, and the formats to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.config import EngineConfig
from windlass.tools.plan.formats import STORED
from windlass.tools.plan.quality import REFERENCE, Retention
from windlass.tools.plan.select import Candidate, Plan

_FORMAT_OPTIONS = ("quantization", "quantize_head", "dtype", "kv_cache_dtype")
SPECS = ("ngram", "lookahead")  # proposers that need no further weights


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """A weight format with a KV cache type."""

    name: str
    options: Mapping[str, Any]
    quality: Retention

    @property
    def weights_key(self) -> str:
        """A key that is equal for formats that can share loaded weights."""
        return repr(sorted((k, v) for k, v in self.options.items() if k != "kv_cache_dtype"))


@dataclass(frozen=True, slots=True)
class Settings:
    """One point of the search space. `num_blocks` None: the engine's default."""

    format: ModelFormat
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    spec: str = "none"

    def options(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            **self.format.options,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.num_blocks is not None:
            own["num_blocks"] = self.num_blocks
        return own | ({"spec": self.spec} if self.spec != "none" else {})

    def config(self, engine_options: Mapping[str, Any]) -> EngineConfig:
        """Apply the settings to the user's options."""
        return EngineConfig.of(**{**engine_options, **self.options()})

    @property
    def title(self) -> str:
        blocks = "" if self.num_blocks is None else f", {self.num_blocks:,} blocks"
        spec = "" if self.spec == "none" else f", {self.spec}"
        return (
            f"{self.format.name}, {self.max_num_seqs} sequences, {self.max_num_batched_tokens:,} "
            f"tokens per step{blocks}{spec}"
        )


def choose_formats(
    found: Plan, max_formats: int, is_named: bool = False
) -> tuple[tuple[ModelFormat, ...], str]:
    """Return the formats that fit and have enough quality, fastest first, and why others are left out.

    The weights as stored come first if their quality is enough. `is_named`: the user named the
    formats; then only a measured quality excludes one, not a typical one.
    """
    poor = [
        item
        for item in found.candidates
        if not item.quality.meets(found.min_quality)
        and not (is_named and item.quality.basis != "measured")
    ]
    by_format: dict[str, list[Candidate]] = {}
    for item in found.candidates:
        if item.fits and item not in poor:
            by_format.setdefault(item.format, []).append(item)
    ranked = sorted(
        by_format,
        key=lambda name: (name != STORED, -max(i.tok_s_all or 0.0 for i in by_format[name])),
    )
    chosen, left = ranked[:max_formats], ranked[max_formats:]
    formats = tuple(
        ModelFormat(
            item.name,
            {k: v for k, v in item.options.items() if k in _FORMAT_OPTIONS},
            item.quality,
        )
        for name in chosen
        # auto and one 8-bit type: the two take one byte per number, and the faster comes first.
        for item in by_format[name][:2]
    )
    why = []
    if poor:
        names = ", ".join(item.name for item in poor)
        why.append(f"expected below --min-quality {found.min_quality:g}: {names}")
    if left:
        why.append(f"slower by the roofline: {', '.join(left)}")
    return formats, "; ".join(why)


def stored_quality(found: Plan) -> Retention:
    """Return the expected retention of the stored weights relative to their original."""
    kinds = (i.quality for i in found.candidates if (i.format, i.kv_dtype) == (STORED, "auto"))
    return next(kinds, REFERENCE)
