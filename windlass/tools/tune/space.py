"""What is searched: sequences, tokens a step, blocks, and the forms of weights and keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from windlass.config import EngineConfig
from windlass.tools.plan.formats import STORED
from windlass.tools.plan.quality import REFERENCE, Retention
from windlass.tools.plan.select import Candidate, Plan

_FORM = ("quantization", "quantize_head", "dtype", "kv_cache_dtype")
_SEQS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cuda": (8, 16, 32, 64, 128, 256, 512)}
_TOKENS = {
    "cpu": (64, 128, 256, 512, 1024, 2048, 4096, 16384, 32768),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768),
}
BLOCK_SHARES = (1.0, 0.5, 0.25)  # of the blocks that the engine would take by itself
SPECS = ("ngram", "lookahead")  # ways to guess that need no other weights


@dataclass(frozen=True, slots=True)
class Form:
    """How weights and keys and values are held."""

    name: str
    options: Mapping[str, Any]
    quality: Retention

    def weights_key(self, device: str) -> str:
        """Forms with the same one can share weights; a GPU's kernels are chosen for the KV type."""
        own = {k: v for k, v in self.options.items() if device == "cuda" or k != "kv_cache_dtype"}
        return repr(sorted(own.items()))


@dataclass(frozen=True, slots=True)
class Settings:
    """One point of the space. `num_blocks` None: as many as the engine takes by itself."""

    form: Form
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    spec: str = "none"

    def options(self) -> dict[str, Any]:
        """Of `serve` and `LLM`."""
        own: dict[str, Any] = {
            **self.form.options,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.num_blocks is not None:
            own["num_blocks"] = self.num_blocks
        return own | ({"spec": self.spec} if self.spec != "none" else {})

    def config(self, given: Mapping[str, Any]) -> EngineConfig:
        """Over what the user set."""
        return EngineConfig.of(**{**given, **self.options()})

    def guessing(self, spec: str) -> Settings:
        return replace(self, spec=spec)

    @property
    def title(self) -> str:
        blocks = "" if self.num_blocks is None else f", {self.num_blocks:,} blocks"
        guesses = "" if self.spec == "none" else f", {self.spec}"
        return (
            f"{self.form.name}, {self.max_num_seqs} sequences, {self.max_num_batched_tokens:,} "
            f"tokens a step{blocks}{guesses}"
        )


@dataclass(frozen=True, slots=True)
class Space:
    """All values of each knob."""

    forms: tuple[Form, ...]
    seqs: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls, device: Literal["cpu", "cuda"], forms: tuple[Form, ...], start: tuple[int, int]
    ) -> Space:
        """`start`: the sequences and tokens of the starting point, which are always among them."""
        return cls(
            forms,
            tuple(sorted({*_SEQS[device], start[0]})),
            tuple(sorted({*_TOKENS[device], start[1]})),
        )


def choose_forms(found: Plan, most: int, is_named: bool = False) -> tuple[tuple[Form, ...], str]:
    """The forms that fit and are good enough, the fastest by the roofline; and what was left out.

    The weights as they are stored are always among them, if they are good enough. Forms that were
    asked for by name are left out by what was measured of them, not by what is typical.
    """
    poor = [
        item
        for item in found.candidates
        if not item.quality.meets(found.min_quality)
        and not (is_named and item.quality.basis != "measured")
    ]
    good = [item for item in found.candidates if item.fits and item not in poor]
    by_format: dict[str, list[Candidate]] = {}
    for item in good:
        by_format.setdefault(item.format, []).append(item)
    ranked = sorted(
        by_format,
        key=lambda name: (name != STORED, -max(i.tok_s_all or 0.0 for i in by_format[name])),
    )
    chosen, left = ranked[:most], ranked[most:]
    forms = tuple(
        Form(item.name, {k: v for k, v in item.options.items() if k in _FORM}, item.quality)
        for name in chosen
        for item in by_format[name]
        # Both are one byte a token; the device's own comes first.
        if item.kv_dtype in _kv_kinds(by_format[name])
    )
    why = []
    if poor:
        names = ", ".join(item.name for item in poor)
        why.append(f"expected below --min-quality {found.min_quality:g}: {names}")
    if left:
        why.append(f"slower by the roofline: {', '.join(left)}")
    return forms, "; ".join(why)


def stored_quality(found: Plan) -> Retention:
    """What the file is expected to have kept of the model that it was made from."""
    kinds = (i.quality for i in found.candidates if (i.format, i.kv_dtype) == (STORED, "auto"))
    return next(kinds, REFERENCE)


def _kv_kinds(items: list[Candidate]) -> list[str]:
    return [item.kv_dtype for item in items][:2]
