"""The rungs and their engine options: alone on the base, and stacked on the rungs before.

The base is continuous batching with 16-bit weights. Weights are only names here; weights.py finds
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from windlass.errors import ConfigError

Mode = Literal["alone", "base", "stacked", "both"]
Kind = Literal["batching", "prefill", "prefix", "weights", "kv", "spec", "all"]

BASE = "continuous"
BASE_WEIGHTS = "16 bit"  # of rungs that do not set weights
# Every rung starts from these options.
BASE_OPTIONS: Mapping[str, Any] = {
    "batching": "continuous",
    "enable_chunked_prefill": False,
    "prefix_caching": False,
    "kv_cache_dtype": "auto",
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One optimisation. `options` override the base; `weights` is the name of its weights."""

    name: str
    title: str
    kind: Kind
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One measurement: a rung alone, or stacked on all before it."""

    rung: Rung
    mode: Mode
    options: Mapping[str, Any]
    weights: str = BASE_WEIGHTS

    @property
    def key(self) -> str:
        return f"{self.rung.name}, {self.mode}"

    @property
    def format(self) -> str:
        """Format of weights and KV cache, which determines the quality."""
        kv_dtype = self.options["kv_cache_dtype"]
        return self.weights if kv_dtype == "auto" else f"{self.weights}, {kv_dtype} KV"


def all_rungs(kv_dtype: str, *, spec: Mapping[str, Any], static: Mapping[str, Any]) -> list[Rung]:
    """All rungs in order. `spec`, `static`: the options of speculation and of static batching."""
    return [
        Rung(
            name="naive",
            title="one request at a time",
            kind="batching",
            options={"batching": "none"},
        ),
        Rung(name="static", title="static batching", kind="batching", options=static),
        Rung(BASE, "continuous batching", "batching"),
        Rung(
            name="chunked",
            title="paged + chunked prefill",
            kind="prefill",
            options={"enable_chunked_prefill": True},
        ),
        Rung(
            name="prefix", title="prefix caching", kind="prefix", options={"prefix_caching": True}
        ),
        Rung("int8", "int8 weights", "weights", weights="int8"),
        Rung("fp8", "fp8 weights", "weights", weights="fp8"),
        Rung("int4", "int4 weights", "weights", weights="int4"),
        Rung("gptq", "GPTQ int4 weights", "weights", weights="gptq"),
        Rung("awq", "AWQ int4 weights", "weights", weights="awq"),
        Rung(
            name="kv", title=f"{kv_dtype} KV cache", kind="kv", options={"kv_cache_dtype": kv_dtype}
        ),
        Rung(name="spec", title=f"speculation ({spec['spec']})", kind="spec", options=spec),
        Rung("everything", "everything", "all"),
    ]


def choose(rungs: Sequence[Rung], names: Sequence[str]) -> list[Rung]:
    """The rungs of these names and the base; without names, all."""
    known = [rung.name for rung in rungs]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--rungs: {unknown[0]!r} is not a rung. Known, in order: {', '.join(known)}."
        )
    return [rung for rung in rungs if not names or rung.name in names or rung.name == BASE]


def make_variants(
    rungs: Sequence[Rung], stack_weights: str | None, missing: Sequence[str]
) -> list[Variant]:
    """The variants to measure, in order.

    Weights replace each other: later rungs stack on `stack_weights`, or on the last available
    weights. `missing` are unavailable weights; their rungs appear once, to report it.
    """
    variants = []
    options, weights = dict(BASE_OPTIONS), BASE_WEIGHTS
    for rung in rungs:
        if rung.kind == "batching":
            mode: Mode = "base" if rung.name == BASE else "alone"
            variants.append(Variant(rung, mode, {**BASE_OPTIONS, **rung.options}))
            continue
        if rung.kind == "all":
            variants.append(
                Variant(rung=rung, mode="stacked", options=dict(options), weights=weights)
            )
            continue
        options |= rung.options
        own = rung.weights or BASE_WEIGHTS
        if own in missing:
            variants.append(Variant(rung=rung, mode="both", options={**BASE_OPTIONS}, weights=own))
            continue
        alone = Variant(
            rung=rung, mode="alone", options={**BASE_OPTIONS, **rung.options}, weights=own
        )
        stacked = Variant(
            rung=rung, mode="stacked", options=dict(options), weights=rung.weights or weights
        )
        if (alone.options, alone.weights) == (stacked.options, stacked.weights):
            variants.append(Variant(rung=rung, mode="both", options=alone.options, weights=own))
        else:
            variants += [alone, stacked]
        if rung.weights is not None and stack_weights in (None, rung.weights):
            weights = rung.weights
    return variants
