"""Expected quality of a format relative to the 16-bit model: from measured records, else typical.

Retention is the 16-bit model's perplexity divided by the format's, at most 1. Typical figures are
published ones for models of 7 to 8 billion parameters; smaller models lose more.
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
# From the most to the least reliable: a combination is as reliable as its worse part.
_ORDER: tuple[Basis, ...] = ("reference", "measured", "typical", "assumed", "unknown")
_LOSSY_OPTIONS = ("quantization", "kv_cache_dtype")  # that a reference must not set


@dataclass(frozen=True, slots=True)
class Retention:
    """The expected share of the 16-bit model's quality, and the source of the figure."""

    value: float | None  # None: unknown
    basis: Basis
    source: str

    def times(self, other: Retention) -> Retention:
        """Combine two losses as if they were independent."""
        if other.basis == "reference":
            return self
        if self.basis == "reference":
            return other
        known = self.value is not None and other.value is not None
        value = round(self.value * other.value, 4) if known else None  # type: ignore[operator]
        basis = max(self.basis, other.basis, key=_ORDER.index)
        return Retention(value, basis, f"{self.source}; {other.source}")

    def meets(self, minimum: float) -> bool:
        """Whether it is known to reach `minimum`; a minimum of 0 accepts unknown quality too."""
        return minimum <= 0 or (self.value is not None and self.value >= minimum)


REFERENCE = Retention(1.0, "reference", "not quantised")
_UNKNOWN = Retention(None, "unknown", "no published figure; measure it with windlass eval")

_AWQ_PAPER = "AWQ paper (arXiv 2306.00978): Llama-2-7B, WikiText-2"
_STUDY = "arXiv 2411.02355: Llama-3.1"
_GGUF = "llama.cpp on OpenLLaMA-7B, WikiText"
_ONLINE = {
    "fp8": Retention(0.995, "typical", _STUDY),
    "fp8-block": Retention(0.995, "typical", _STUDY),
    "int8": Retention(0.999, "typical", f"as Q8_0: {_GGUF}"),
    "w8a8": Retention(0.98, "typical", _STUDY),
    "int4": Retention(0.955, "typical", f"{_AWQ_PAPER}, round to nearest"),
    "w4a8": Retention(0.95, "assumed", f"{_AWQ_PAPER}, round to nearest; 8-bit activations"),
    "nf4": Retention(0.965, "assumed", "between round to nearest and AWQ"),
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
    8: Retention(0.999, "assumed", "quantised head"),
    4: Retention(0.99, "assumed", "quantised head"),
}
_KV = {
    "auto": REFERENCE,
    "fp8": Retention(0.999, "assumed", "8-bit KV is commonly reported as lossless"),
    "int8": Retention(0.999, "assumed", "8-bit KV is commonly reported as lossless"),
}


def typical(quantization: str, head: bool) -> Retention:
    """Return the typical retention of weights that are quantised while loading."""
    retention = _ONLINE[quantization]
    bits = 4 if quantization in ("int4", "w4a8", "nf4") else 8
    return retention.times(_HEAD[bits]) if head else retention


def typical_kv(dtype: str) -> Retention:
    return _KV[dtype]


def typical_gguf(kind: str) -> Retention:
    """Return the typical retention of a GGUF by the type of most of its bytes."""
    if kind not in _GGUF_PERPLEXITY:
        return _UNKNOWN
    return Retention(round(6.9966 / _GGUF_PERPLEXITY[kind], 4), "typical", f"{kind}: {_GGUF}")


def typical_stored(name: str, scheme: Scheme) -> Retention:
    """Return the typical retention of a quantised checkpoint: by its method if known, else its scheme."""
    if name in ("awq", "gptq") and scheme.kind == "int4":
        value = {"awq": 0.977, "gptq": 0.961}[name]
        return Retention(value, "typical", f"{_AWQ_PAPER}, {name} in groups of 128")
    if scheme.kind == "int8":
        return _ONLINE["int8" if scheme.activation == "none" else "w8a8"]
    return _ONLINE[{"int4": "int4", "fp8": "fp8", "table4": "nf4", "mxfp4": "nf4"}[scheme.kind]]


@dataclass(frozen=True, slots=True)
class MeasuredQuality:
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


def read_records(folder: Path) -> list[MeasuredQuality]:
    """Read the records of `windlass eval` and `windlass bench formats`, and skip other files."""
    if not folder.is_dir():
        raise ConfigError(f"--records {folder}: there is no such folder.")
    found: list[MeasuredQuality] = []
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
                f"{error}. Remove it, or measure again."
            ) from error
    return found


def find(
    records: Iterable[MeasuredQuality],
    model: str,
    quantization: str | None,
    head: bool = False,
    kv_dtype: str = "auto",
    other_reference: bool = False,
) -> Retention | None:
    """Return the newest matching record; records of eval take precedence.

    `other_reference`: only records that compare a quantised file with its original.
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


def _read_eval(values: Mapping[str, Any], path: Path) -> Iterator[MeasuredQuality]:
    """Read an eval record; a comparison with a lossy reference gives no retention."""
    settings = values["settings"]
    model, reference = settings["model"], settings["reference"]
    ratio = next(row for row in values["rows"] if row["label"] == "all")["ppl_ratio"]
    options = model["options"]
    if any(reference["options"].get(name) for name in _LOSSY_OPTIONS):
        return
    yield MeasuredQuality(
        model=model["name"],
        quantization=options.get("quantization"),
        head=bool(options.get("quantize_head")),
        kv_dtype=options.get("kv_cache_dtype", "auto"),
        reference=reference["name"],
        retention=retention_of(ratio),
        date=str(values["date"]),
        path=str(path),
    )


def _read_formats(values: Mapping[str, Any], path: Path) -> Iterator[MeasuredQuality]:
    """Read the rows of online formats, as served, and the rows of KV cache types alone."""
    # Older records do not name the model, and match none.
    model, date = str(values["settings"].get("name", "")), str(values["date"])
    quantization: str | None
    for row in values["rows"]:
        if "error" in row:
            continue
        name, plus, _ = str(row["format"]).partition("+")
        if name in _ONLINE:
            quantization, kv_dtype, increase = name, "auto", row["served_increase_pct"]
        elif name.startswith("kv-"):
            quantization, kv_dtype = None, name.removeprefix("kv-")
            increase = row["increase_pct"]
        else:
            continue
        yield MeasuredQuality(
            model=model,
            quantization=quantization,
            head=bool(plus),
            kv_dtype=kv_dtype,
            reference=model,
            retention=retention_of(1 + increase / 100),
            date=date,
            path=str(path),
            by_eval=False,
        )


def retention_of(ppl_ratio: float) -> float:
    return round(min(1.0, 1 / ppl_ratio), 4)


_READERS = {"quality": _read_eval, "formats": _read_formats}
