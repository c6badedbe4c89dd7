"""The time of single kernels on an H200, from the bytes that they read and the operations they compute.

    seconds = max(bytes / bandwidth, operations / rate) + a fixed time

Each kind of kernel has its own three numbers. The defaults are from records of whole steps on one GPU;
`fit` replaces them with those of benchmarks/scripts/sharded_shapes.py, which times the kernels of
divided weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch

from windlass.errors import ConfigError
from windlass.tools.common.record import Record, read_record

# fp8 blocks: one scale per 128 x 128 weights. experts: all of a layer, with routing and the sum.
# latent projection: of MLA's queries and outputs. latent prompts: attention of a prompt's tokens to keys
# and values that a GEMM makes from their latents.
# small: norms, activations, RoPE, and other kernels that are bound by their launch.
KernelKind = Literal[
    "bf16",
    "fp8",
    "fp8 blocks",
    "other codes",
    "bf16 experts",
    "fp8 experts",
    "other experts",
    "attention",
    "8-bit attention",
    "latent attention",
    "8-bit latent attention",
    "latent prompts",
    "latent projection",
    "small",
]
KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
RECORD_NAME = "sharded_shapes"
_MIN_POINTS = 4  # of a kind, to fit its numbers
_PULL = 1e-3  # towards the default, for numbers that no point depends on


_PLAIN_NAMES = ("bf16", "fp8", "fp8 blocks", "other codes", "small")


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption of an estimate, and where its value is from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one kernel, or of the kernels of one operation."""

    kind: KernelKind
    num_bytes: float
    num_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What kernels of one kind reach."""

    bandwidth: float  # bytes per second
    flops: float  # operations per second
    fixed_s: float

    def seconds(self, kernel: Kernel) -> float:
        busy = max(kernel.num_bytes / self.bandwidth, kernel.num_flops / self.flops)
        return busy + self.fixed_s


# Bandwidth: 0.95 of the 4.1 to 4.4 TB/s that reads reach; attention over 8-bit codes is bound by their
# conversion. Operations: GEMMs of prefill steps. Fixed: 22 µs per dense layer, of which four are GEMMs.
_GEMM = Rate(4.0e12, 720e12, 2.5e-6)
DEFAULT_RATES: dict[KernelKind, Rate] = {
    "bf16": _GEMM,
    "fp8": Rate(4.0e12, 1250e12, 3.0e-6),
    "fp8 blocks": Rate(3.6e12, 500e12, 4.0e-6),
    "other codes": Rate(2.6e12, 600e12, 3.5e-6),
    "bf16 experts": Rate(4.0e12, 450e12, 14e-6),
    "fp8 experts": Rate(3.4e12, 370e12, 20e-6),
    "other experts": Rate(2.4e12, 400e12, 16e-6),
    "attention": Rate(3.8e12, 330e12, 5e-6),
    "8-bit attention": Rate(2.8e12, 330e12, 5e-6),
    "latent attention": Rate(2.8e12, 90e12, 20e-6),
    "8-bit latent attention": Rate(2.8e12, 80e12, 20e-6),
    "latent prompts": Rate(2.8e12, 480e12, 22e-6),
    "latent projection": Rate(2.0e12, 140e12, 3.0e-6),
    "small": Rate(3.5e12, 30e12, 2.0e-6),
}
_DEFAULT_SOURCE = (
    "fitted to the records of whole steps on one H200 (h200-llama-3.1-8b, h200-llama-3.1-8b-fp8, "
    "h200-qwen3-30b-a3b-fp8, h200-deepseek-v2-lite); not checked at divided shapes"
)


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """How far predictions are from measured kernels of one kind; 0.1 is 10 %."""

    kind: KernelKind
    num_points: int
    median_error: float
    worst_error: float
    worst: str  # the kernel with the worst error


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Rates of all kinds, with their source. `checks` is empty if nothing was measured."""

    rates: Mapping[KernelKind, Rate] = field(default_factory=lambda: dict(DEFAULT_RATES))
    source: str = _DEFAULT_SOURCE
    checks: tuple[KernelCheck, ...] = ()

    def seconds(self, kernel: Kernel) -> float:
        return self.rates[kernel.kind].seconds(kernel)

    def verdict(self, kinds: Collection[KernelKind]) -> str:
        """Whether the kernels of these kinds were measured, and how far predictions are from them."""
        if not self.checks:
            return "not checked: no record of benchmarks/scripts/sharded_shapes.py was found"
        points = sum(check.num_points for check in self.checks)
        middle = median(check.median_error for check in self.checks)
        worst = max(self.checks, key=lambda check: check.worst_error)
        unchecked = sorted(set(kinds) - {check.kind for check in self.checks})
        return (
            f"checked with {points} measured kernels at divided shapes: median error {middle:.0%}, worst "
            f"{worst.worst_error:.0%} ({worst.worst})"
            + (f"; not checked: {', '.join(unchecked)}" if unchecked else "")
        )

    def assumptions(self, kinds: Sequence[KernelKind]) -> list[Assumption]:
        """The rates of some kinds."""
        return [
            Assumption(
                f"{kind} kernels" if kind in _PLAIN_NAMES else kind,
                f"{self.rates[kind].bandwidth / 1e12:.2f} TB/s, {self.rates[kind].flops / 1e12:,.0f} "
                f"TFLOP/s, {self.rates[kind].fixed_s * 1e6:.1f} µs each",
                self._source_of(kind),
            )
            for kind in kinds
        ]

    def _source_of(self, kind: KernelKind) -> str:
        check = next((each for each in self.checks if each.kind == kind), None)
        if check is None:
            return _DEFAULT_SOURCE
        return (
            f"{self.source}: {check.num_points} kernels, median error {check.median_error:.0%}, worst "
            f"{check.worst_error:.0%} ({check.worst})"
        )


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """A kernel's work and its measured time."""

    name: str  # "llama-3.1-70b o_proj, 1/4, 8 tokens"
    kernel: Kernel
    seconds: float


def fit(points: Sequence[MeasuredKernel], source: str) -> KernelTimes:
    """Fit the rates of every kind with enough points; other kinds keep their defaults."""
    rates, checks = dict(DEFAULT_RATES), []
    for kind in KINDS:
        own = [point for point in points if point.kernel.kind == kind]
        if len(own) >= _MIN_POINTS:
            rates[kind] = _fit_rate(own, DEFAULT_RATES[kind])
        if own:
            checks.append(check(own, rates[kind]))
    return KernelTimes(rates=rates, source=source, checks=tuple(checks))


def check(points: Sequence[MeasuredKernel], rate: Rate) -> KernelCheck:
    """Compare predictions with measured times of one kind."""
    errors = {point.name: abs(rate.seconds(point.kernel) / point.seconds - 1) for point in points}
    worst = max(errors, key=lambda name: errors[name])
    return KernelCheck(
        kind=points[0].kernel.kind,
        num_points=len(points),
        median_error=round(median(errors.values()), 4),
        worst_error=round(errors[worst], 4),
        worst=worst,
    )


def _fit_rate(points: Sequence[MeasuredKernel], default: Rate) -> Rate:
    """The rate with the least mean relative error, by two searches over a grid."""
    best = default
    for width in (4.0, 1.2):
        best = _search(points, best, width)
    return best


def _search(points: Sequence[MeasuredKernel], around: Rate, width: float) -> Rate:
    """The best of 21 x 21 x 31 rates, each number from 1 / width to width times that of `around`."""
    factors = torch.logspace(-math.log2(width), math.log2(width), 21, base=2.0, dtype=torch.float64)
    fixed = around.fixed_s * torch.linspace(1 / width, width, 31, dtype=torch.float64)
    numbers = [(each.kernel.num_bytes, each.kernel.num_flops, each.seconds) for each in points]
    num_bytes, num_flops, seconds = torch.tensor(numbers, dtype=torch.float64).T
    reading = num_bytes / (around.bandwidth * factors[:, None, None, None])
    computing = num_flops / (around.flops * factors[:, None, None])
    predicted = torch.maximum(reading, computing) + fixed[:, None]
    errors = (predicted / seconds).log().abs().mean(-1)  # robust against single odd kernels
    away = factors.log().square()
    errors = errors + _PULL * (away[:, None, None] + away[:, None])
    at = int(errors.argmin())
    i, j, k = at // (21 * 31), at // 31 % 21, at % 31
    return replace(
        around,
        bandwidth=around.bandwidth * float(factors[i]),
        flops=around.flops * float(factors[j]),
        fixed_s=float(fixed[k]),
    )


def read_kernel_times(folder: Path | None, gpu: str) -> KernelTimes:
    """Fit the rates to the newest record of sharded shapes on this GPU; the defaults without one."""
    found = [] if folder is None else sorted(folder.glob("*sharded-shapes*.json"))
    records = [(read_record(path), path) for path in found]
    fitting = [
        (record, path)
        for record, path in records
        if record.name == RECORD_NAME and gpu.lower() in record.hardware.lower()
    ]
    if not fitting:
        return KernelTimes()
    record, path = max(fitting, key=lambda item: item[0].date)
    return fit(measured_kernels(record, path), f"measured on {record.date} ({path.name})")


def measured_kernels(record: Record, path: Path) -> list[MeasuredKernel]:
    """The kernels of a record; one that was not measured has no time."""
    try:
        return [measured_kernel(row) for row in record.rows if row["us"] is not None]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: is not a record of benchmarks/scripts/sharded_shapes.py ({error!r}). Remove it, "
            "or measure again."
        ) from error


def measured_kernel(row: Mapping[str, Any]) -> MeasuredKernel:
    kind, seconds = row["kind"], float(row["us"]) / 1e6
    if kind not in KINDS or not seconds > 0:
        raise ValueError(f"{kind!r} kernel of {seconds} s")
    name = f"{row['model']} {row['weight']}, {row['share']}, {row['tokens']} tokens"
    kernel = Kernel(kind, float(row["bytes"]), float(row["flops"]))
    return MeasuredKernel(name=name, kernel=kernel, seconds=seconds)
