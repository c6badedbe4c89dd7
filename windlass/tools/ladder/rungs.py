"""The rungs, and what is set for each: alone on the base, and stacked on the rungs before it.

The base is continuous batching with weights of 16 bits. Where the weights of a rung come from is
forms.py's business; here they have only a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.errors import ConfigError

Way = Literal["alone", "base", "stacked", "both"]
Kind = Literal["batching", "prefill", "prefix", "weights", "kv", "spec", "all"]

BASE = "continuous"
PLAIN = "16 bit"  # the weights of rungs that have none of their own
# What every rung starts from.
BARE: Mapping[str, Any] = {
    "batching": "continuous",
    "enable_chunked_prefill": False,
    "prefix_caching": False,
    "kv_cache_dtype": "auto",
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One lever. `options` are laid over the base; `weights` names the form of the weights."""

    name: str
    title: str
    kind: Kind
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """What is measured: one rung, alone or on all before it."""

    rung: Rung
    way: Way
    options: Mapping[str, Any]
    weights: str = PLAIN

    @property
    def key(self) -> str:
        return f"{self.rung.name}, {self.way}"

    @property
    def format(self) -> str:
        """What its quality depends on."""
        kept = self.options["kv_cache_dtype"]
        return self.weights if kept == "auto" else f"{self.weights}, {kept} KV"


def all_rungs(kv_dtype: str, spec: Mapping[str, Any]) -> list[Rung]:
    """In their order. `spec`: the settings of speculation."""
    return [
        Rung("naive", "one request at a time", "batching", {"batching": "none"}),
        Rung("static", "static batching", "batching", {"batching": "static"}),
        Rung(BASE, "continuous batching", "batching"),
        Rung("chunked", "paged + chunked prefill", "prefill", {"enable_chunked_prefill": True}),
        Rung("prefix", "prefix caching", "prefix", {"prefix_caching": True}),
        Rung("int8", "int8 weights", "weights", weights="int8"),
        Rung("fp8", "fp8 weights", "weights", weights="fp8"),
        Rung("int4", "int4 weights", "weights", weights="int4"),
        Rung("gptq", "GPTQ int4 weights", "weights", weights="gptq"),
        Rung("awq", "AWQ int4 weights", "weights", weights="awq"),
        Rung("kv", f"{kv_dtype} KV cache", "kv", {"kv_cache_dtype": kv_dtype}),
        Rung("spec", f"speculation ({spec['spec']})", "spec", spec),
        Rung("everything", "everything", "all"),
    ]


def choose(rungs: Sequence[Rung], names: Sequence[str]) -> list[Rung]:
    """Those of these names, and the base; all without a name."""
    known = [rung.name for rung in rungs]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--rungs: {unknown[0]!r} is no rung. Known, in their order: {', '.join(known)}."
        )
    return [rung for rung in rungs if not names or rung.name in names or rung.name == BASE]


def climb(rungs: Sequence[Rung], standing: str | None, missing: Sequence[str]) -> list[Variant]:
    """What is to be measured, in order.

    Weights replace each other: later rungs stand on `standing`, or on the last of the weights that
    can be. `missing` names the forms that cannot; their rungs are here once, to say so.
    """
    variants = []
    options, weights = dict(BARE), PLAIN
    for rung in rungs:
        if rung.kind == "batching":
            way: Way = "base" if rung.name == BASE else "alone"
            variants.append(Variant(rung, way, {**BARE, **rung.options}))
            continue
        if rung.kind == "all":
            variants.append(Variant(rung, "stacked", dict(options), weights))
            continue
        options |= rung.options
        own = rung.weights or PLAIN
        if own in missing:
            variants.append(Variant(rung, "both", {**BARE}, own))
            continue
        alone = Variant(rung, "alone", {**BARE, **rung.options}, own)
        stacked = Variant(rung, "stacked", dict(options), rung.weights or weights)
        if (alone.options, alone.weights) == (stacked.options, stacked.weights):
            variants.append(Variant(rung, "both", alone.options, own))
        else:
            variants += [alone, stacked]
        if rung.weights is not None and standing in (None, rung.weights):
            weights = rung.weights
    return variants
