"""What a format can be expected to keep of the 16-bit model: measured records first, else typical.

Retention is the perplexity of the 16-bit model over that of the format, at most 1. Typical figures
are those that others published for models of 7 to 8 billion parameters; smaller ones lose more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from windlass.errors import ConfigError
from windlass.quant.rounding import Scheme

Basis = Literal["reference", "measured", "typical", "assumed", "unknown"]
# From the best founded to the least: what is multiplied is as good as the worse of the two.
_ORDER: tuple[Basis, ...] = ("reference", "measured", "typical", "assumed", "unknown")
_LOSSLESS = ("quantization", "kv_cache_dtype")  # what a reference must not have set


@dataclass(frozen=True, slots=True)
class Retention:
    """The expected share of the 16-bit model's quality, and where the figure is from."""

    value: float | None  # None: nobody knows
    basis: Basis
    source: str

    def times(self, other: Retention) -> Retention:
        """Both losses together, as if they did not depend on each other."""
        if other.basis == "reference":
            return self
        if self.basis == "reference":
            return other
        known = self.value is not None and other.value is not None
        value = round(self.value * other.value, 4) if known else None  # type: ignore[operator]
        basis = max(self.basis, other.basis, key=_ORDER.index)
        return Retention(value, basis, f"{self.source}; {other.source}")

    def meets(self, least: float) -> bool:
        """Whether it is known to be enough; without a limit everything is."""
        return least <= 0 or (self.value is not None and self.value >= least)


REFERENCE = Retention(1.0, "reference", "not quantised")
_UNKNOWN = Retention(None, "unknown", "no published figure; measure it with windlass eval")

_ROUNDING = "AWQ paper (arXiv 2306.00978): Llama-2-7B, WikiText-2"
_STUDY = "arXiv 2411.02355: Llama-3.1"
_GGUF = "llama.cpp on OpenLLaMA-7B, WikiText"
_ONLINE = {
    "fp8": Retention(0.995, "typical", _STUDY),
    "fp8-block": Retention(0.995, "typical", _STUDY),
    "int8": Retention(0.999, "typical", f"as Q8_0: {_GGUF}"),
    "w8a8": Retention(0.98, "typical", _STUDY),
    "int4": Retention(0.955, "typical", f"{_ROUNDING}, round to nearest"),
    "w4a8": Retention(0.95, "assumed", f"{_ROUNDING}, round to nearest; activations in 8 bits"),
    "nf4": Retention(0.965, "assumed", "between rounding to nearest and AWQ"),
}
# The 16-bit model's perplexity is 6.9966.
_GGUF_PERPLEXITY = {
    "Q2_K": 8.5152,
    "Q3_K": 7.3837,
    "Q4_0": 7.2116,
    "Q4_1": 7.1609,
    "Q4_K": 7.1116,
    "Q5_0": 7.0353,
    "Q5_1": 7.0318,
    "Q5_K": 7.0272,
    "Q6_K": 7.0050,
    "Q8_0": 6.9968,
}
_HEAD = {
    8: Retention(0.999, "assumed", "the head rounded too"),
    4: Retention(0.99, "assumed", "the head rounded too"),
}
_KV = {
    "auto": REFERENCE,
    "fp8": Retention(0.999, "assumed", "8-bit KV is commonly reported as lossless"),
    "int8": Retention(0.999, "assumed", "8-bit KV is commonly reported as lossless"),
}


def typical(quantization: str, head: bool) -> Retention:
    """Of weights that are rounded while loading."""
    kept = _ONLINE[quantization]
    bits = 4 if quantization in ("int4", "w4a8", "nf4") else 8
    return kept.times(_HEAD[bits]) if head else kept


def typical_kv(dtype: str) -> Retention:
    return _KV[dtype]


def typical_gguf(kind: str) -> Retention:
    """Of a GGUF whose heaviest matrices are of this type."""
    if kind not in _GGUF_PERPLEXITY:
        return _UNKNOWN
    return Retention(round(6.9966 / _GGUF_PERPLEXITY[kind], 4), "typical", f"{kind}: {_GGUF}")


def typical_stored(name: str, scheme: Scheme) -> Retention:
    """Of a checkpoint that others quantised: by its method where that is known, else by its form."""
    if name in ("awq", "gptq") and scheme.kind == "int4":
        value = {"awq": 0.977, "gptq": 0.961}[name]
        return Retention(value, "typical", f"{_ROUNDING}, {name} in groups of 128")
    if scheme.kind == "int8":
        return _ONLINE["int8" if scheme.activation == "none" else "w8a8"]
    return _ONLINE[{"int4": "int4", "fp8": "fp8", "table4": "nf4"}[scheme.kind]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One record of `windlass eval`, or one row of `windlass bench formats`."""

    model: str
    quantization: str | None
    head: bool
    kv_dtype: str
    reference: str
    retention: float
    date: str
    path: str
    by_eval: bool = True

    def as_retention(self) -> Retention:
        return Retention(self.retention, "measured", f"{self.path}, {self.date}")


def read_records(folder: Path) -> list[Measured]:
    """What `windlass eval` and `windlass bench formats` wrote there; others are passed over."""
    if not folder.is_dir():
        raise ConfigError(f"--records {folder}: there is no such folder.")
    found: list[Measured] = []
    for path in sorted(folder.glob("*.json")):
        values = _record(path)
        read = _READERS.get(str(values.get("name")))
        if read is None:
            continue
        try:
            found += read(values, path)
        except (KeyError, TypeError, StopIteration, ZeroDivisionError) as error:
            raise ConfigError(
                f"--records: {path} says that it is a record of {values['name']!r}, but lacks "
                f"{error}. Remove or repeat it."
            ) from error
    return found


def find(
    records: Iterable[Measured],
    model: str,
    quantization: str | None,
    head: bool = False,
    kv_dtype: str = "auto",
    other_reference: bool = False,
) -> Retention | None:
    """The newest that fits, of eval before others.

    `other_reference`: a file beside the model that it was made from.
    """
    found = [
        item
        for item in records
        if (item.model, item.quantization, item.head, item.kv_dtype)
        == (model, quantization, head, kv_dtype)
        and (not other_reference or item.reference != model)
    ]
    newest = max(found, key=lambda item: (item.by_eval, item.date), default=None)
    return newest.as_retention() if newest is not None else None


def _record(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--records: {path} cannot be read: {error}.") from error
    return values if isinstance(values, dict) else {}


def _of_eval(values: Mapping[str, Any], path: Path) -> Iterator[Measured]:
    """Nothing where the comparison does not say what a format costs."""
    settings = values["settings"]
    model, reference = settings["model"], settings["reference"]
    ratio = next(row for row in values["rows"] if row["label"] == "all")["ppl_ratio"]
    options = model["options"]
    if any(reference["options"].get(name) for name in _LOSSLESS):
        return
    yield Measured(
        model["name"],
        options.get("quantization"),
        bool(options.get("quantize_head")),
        options.get("kv_cache_dtype", "auto"),
        reference["name"],
        _kept(ratio),
        str(values["date"]),
        str(path),
    )


def _of_formats(values: Mapping[str, Any], path: Path) -> Iterator[Measured]:
    """The rows that are made while loading, as they are served; and caches, by themselves."""
    # Older ones do not name it, and fit none.
    model, date = str(values["settings"].get("name", "")), str(values["date"])
    for row in values["rows"]:
        if "error" in row:
            continue
        name, plus, _ = str(row["format"]).partition("+")
        if name in _ONLINE:
            kept = _kept(1 + row["served_increase_pct"] / 100)
            yield Measured(model, name, bool(plus), "auto", model, kept, date, str(path), False)
        elif name.startswith("kv-"):
            kept = _kept(1 + row["increase_pct"] / 100)
            kind = name.removeprefix("kv-")
            yield Measured(model, None, False, kind, model, kept, date, str(path), False)


def _kept(ratio: float) -> float:
    return round(min(1.0, 1 / ratio), 4)


_READERS = {"quality": _of_eval, "formats": _of_formats}
