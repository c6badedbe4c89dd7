"""Plans and predictions as text: formats, the grid of contexts, the choice; figures of a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from windlass.runner.device import gib
from windlass.tools.plan.select import Candidate, Plan
from windlass.tools.plan.speed import Factor
from windlass.tools.plan.what_if import Prediction

_WIDTH = 50
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_TOKENS = (128, 512)


def show(found: Plan, command: str | None) -> None:
    """Print it, never cut off: a narrow terminal wraps the lines. `command` serves the choice."""
    console = Console(width=1000, soft_wrap=True, highlight=False, markup=False)
    by_format: dict[str, list[Candidate]] = {}
    for item in found.candidates:
        by_format.setdefault(item.format, []).append(item)
    console.print(_formats(found, by_format))
    if found.candidates:
        shown = found.best or min(found.candidates, key=lambda item: item.total_bytes)
        console.print()
        console.print(_most(by_format[shown.format]))
        console.print()
        console.print(_grid(shown))
        console.print()
        console.print(_ledger(found, shown))
    console.print()
    for line in _notes(found):
        console.print(line)
    console.print()
    if found.best is None or command is None:
        console.print(f"No choice: {found.shortfall}")
        return
    kept = found.best.quality
    quality = "unknown" if kept.value is None else f"{kept.value:.3f}"
    console.print(
        f"Recommended: {found.best.name}, {gib(found.best.total_bytes)}; expected are "
        f"{_rate(found.best.tok_s_all)} tok/s and a quality of {quality} ({kept.basis}: "
        f"{kept.source})."
    )
    console.print(f"  {command}")


def _formats(found: Plan, by_format: Mapping[str, list[Candidate]]) -> Table:
    kinds = " / ".join(dict.fromkeys(item.kv_dtype for item in found.candidates))
    table = Table(box=None, pad_edge=False)
    table.add_column("weights")
    for heading in (
        "bytes",
        f"KV a token: {kinds}",
        f"needs for {found.concurrency} x {found.context:,}",
        "fits",
        "tok/s x 1",
        f"tok/s x {found.concurrency}",
        "quality",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, items in by_format.items():
        table.add_row(
            name,
            f"{items[0].weight_bytes:,}",
            " / ".join(gib(item.kv_bytes_per_token) for item in items),
            " / ".join(gib(item.total_bytes) for item in items),
            " / ".join("yes" if item.fits else "no" for item in items),
            " / ".join(_rate(item.tok_s_one) for item in items),
            " / ".join(_rate(item.tok_s_all) for item in items),
            " / ".join(_quality(item) for item in items),
        )
    return table


def _most(items: list[Candidate]) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left")
    table.add_column(f"requests that fit with {items[0].format}, by context")
    for item in items:
        table.add_column(f"{item.kv_dtype} KV", justify="right")
    for context in items[0].most_requests:
        table.add_row(f"{context:,}", *(f"{item.most_requests[context]:,}" for item in items))
    return table


def _grid(item: Candidate) -> Table:
    """Contexts down, requests at once across: what all of them get together, where they fit."""
    table = Table(box=None, pad_edge=False)
    table.add_column(f"tok/s with {item.name}, by context and requests at once; -: does not fit")
    counts = next(iter(item.grid.values()))
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    for context, speeds in item.grid.items():
        room = item.most_requests[context]
        cells = ["-" if count > room else _speed(speed) for count, speed in speeds.items()]
        table.add_row(f"{context:,}", *cells)
    return table


def _speed(value: float | None) -> str:
    return "fits" if value is None else _rate(value)


def _ledger(found: Plan, item: Candidate) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"ledger of {item.name}, {found.concurrency} x {found.context:,} tokens")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    kv_bytes = item.options["kv_cache_memory_bytes"]
    spare = item.total_bytes - item.weight_bytes - kv_bytes - item.step_bytes
    rows = [
        ("weights", item.weight_bytes),
        ("keys and values", kv_bytes),
        ("the largest step, an estimate", item.step_bytes),
        ("blocks that the runner keeps", spare),
        ("together", item.total_bytes),
        ("memory", found.memory_bytes),
        ("left" if item.fits else "missing", abs(found.memory_bytes - item.total_bytes)),
    ]
    for name, num_bytes in rows:
        if num_bytes or name != "blocks that the runner keeps":
            table.add_row(name, f"{num_bytes:,}", gib(num_bytes))
    return table


def _notes(found: Plan) -> list[str]:
    machine = found.machine
    gemm = "" if machine.flops is None else f", {machine.flops / 1e9:,.0f} GFLOP/s"
    most = "" if machine.flops else " Products are taken to be free, so speeds are upper limits."
    lines = [
        f"Memory: {gib(found.memory_bytes)} ({found.memory_source}); the process and "
        "recorded graphs are not counted, steps of up to "
        f"{found.step_tokens:,} tokens are, by an estimate.",
        f"Speed: an estimate for full contexts from {machine.bandwidth / 1e9:,.1f} GB/s{gemm} "
        f"({machine.source}); {_factor(machine.factor)}.{most}",
        "Quality: the 16-bit model's perplexity over the format's. m: measured, by windlass "
        "eval or bench formats; t: typical of models of 7 to 8 billion parameters; a: assumed; no letter: the reference.",
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in found.refused.items():
        reasons.setdefault(why, []).append(name)
    return [*lines, *(f"Not offered: {', '.join(names)}: {why}" for why, names in reasons.items())]


def _factor(factor: Factor) -> str:
    gemm = "" if factor.gemm_share == 1 else f", {factor.gemm_share:.2g} of the products"
    layers = f", {factor.layer_seconds * 1e6:g} µs a layer" if factor.layer_seconds else ""
    return f"{factor.share:.2g} of the reading is reached{gemm}{layers} ({factor.source})"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _quality(item: Candidate) -> str:
    kept = item.quality
    if kept.value is None:
        return "?"
    letter = "" if kept.basis == "reference" else f" {kept.basis[0]}"
    return f"{kept.value:.3f}{letter}"


def lines(found: Prediction, max_concurrency: int | None, request_rate: float) -> Iterator[str]:
    """As they are printed."""
    limits, capacity, run = found.limits, found.capacity, found.run
    yield (
        f"Settings: {limits.max_num_seqs:,} sequences ({limits.seqs_reason}), "
        f"{limits.max_num_batched_tokens:,} tokens a step ({limits.tokens_reason}), "
        f"{capacity.num_blocks:,} blocks of {capacity.block_size} tokens ({capacity.reason})."
    )
    yield from _costs(found)
    told = found.summary.lines(max_concurrency=max_concurrency, request_rate=request_rate)
    yield " Predicted Serving Result ".center(_WIDTH, "=")
    yield from told[1:-1]
    yield "KV cache and queue".center(_WIDTH, "-")
    for name, value in (
        ("KV in use, peak (%):", f"{100 * run.peak_kv:.2f}"),
        ("KV in use, mean (%):", f"{100 * run.mean_kv:.2f}"),
        ("Most requests waiting:", run.peak_waiting),
        ("Preemptions:", run.num_preemptions),
        ("Steps:", run.num_steps),
    ):
        yield f"{name:<40} {value}"
    yield "=" * _WIDTH
    for error, count in found.summary.errors.items():
        yield f"{count} would fail: {error}"
    yield from _promise(found)


def _costs(found: Prediction) -> Iterator[str]:
    costs, rows = found.steps.costs, [n for n in _SHOWN_ROWS if n <= found.limits.max_num_seqs]
    steps = ", ".join(f"{n}: {1e3 * costs.decode_seconds(n, 128):.1f}" for n in rows)
    most = found.limits.max_num_batched_tokens
    sizes = [n for n in _SHOWN_TOKENS if n < most] + [most]
    prompts = ", ".join(f"{n}: {1e3 * costs.tokens.of(n):.0f}" for n in sizes)
    yield (
        f"Steps ({found.steps.source}): ms by requests that decode {steps}; by tokens of prompts "
        f"{prompts}."
    )


def _promise(found: Prediction) -> Iterator[str]:
    if not found.slo.targets:
        return
    misses = found.slo.misses(found.summary)
    yield f"SLO {found.slo}: " + ("met." if not misses else f"missed: {'; '.join(misses)}.")
    for fleet in found.fleets:
        kept = "meets it" if not fleet.misses else f"misses it: {'; '.join(fleet.misses)}"
        yield (
            f"  {fleet.num_devices} x: {fleet.summary.output_throughput:,.1f} tok/s, goodput "
            f"{fleet.summary.request_goodput or 0.0:.2f} req/s, {kept}"
        )
    if found.fleets:
        enough = next((fleet for fleet in found.fleets if not fleet.misses), None)
        yield (
            f"Devices needed: {enough.num_devices}, each with a copy of the model."
            if enough is not None
            else f"Not even {found.fleets[-1].num_devices} devices keep it: more only help while "
            "requests wait for each other."
        )
