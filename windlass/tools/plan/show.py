"""Prints plans of one device and of several, and predictions of loads, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from windlass.runner.device import gib
from windlass.tools.common.report import plain_table, wide_console
from windlass.tools.common.summary import line_of
from windlass.tools.plan.scaling import PROMPT, Layout, ScalingPlan
from windlass.tools.plan.select import Candidate, Plan
from windlass.tools.plan.speed import Factor
from windlass.tools.plan.what_if import Prediction

_WIDTH = 50
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_TOKENS = (128, 512)
_SPARE_BLOCKS = "blocks reserved by the runner"
_OFFLOAD = "KV offload"
_COPIES = "16-bit copies of weights"


def show(found: Plan, command: str | None) -> None:
    """Print a plan; a narrow terminal wraps lines, and nothing is cut. `command` serves the choice."""
    console = wide_console()
    by_format: dict[str, list[Candidate]] = {}
    for item in found.candidates:
        by_format.setdefault(item.format, []).append(item)
    console.print(_formats(found, by_format))
    if found.candidates:
        shown = found.best or min(found.candidates, key=lambda item: item.total_bytes)
        tables = (_max_requests(by_format[shown.format]), _grid(shown), _memory(found, shown))
        for table in tables:
            console.print()
            console.print(table)
    console.print()
    for line in _notes(found):
        console.print(line)
    console.print()
    if found.best is None or command is None:
        console.print(f"No choice: {found.shortfall}")
        return
    retention = found.best.quality
    quality = "unknown" if retention.value is None else f"{retention.value:.3f}"
    console.print(
        f"Recommended: {found.best.name}, {gib(found.best.total_bytes)}; expected speed "
        f"{_rate(found.best.tok_s_all)} tok/s, expected quality {quality} ({retention.basis}: "
        f"{retention.source})."
    )
    console.print(f"  {command}")
    faster = found.faster
    if faster is not None and faster != found.best:
        console.print(
            f"Faster, with less quality: {faster.name}, {_rate(faster.tok_s_all)} tok/s, expected "
            f"quality {faster.quality.value or 0.0:.3f}; --min-quality sets the limit, which is "
            f"{found.min_quality:.3f} here, 0.99 of the best that fits."
        )


def _table(heading: str) -> Table:
    table = plain_table()
    table.add_column(heading)
    return table


def _formats(found: Plan, by_format: Mapping[str, list[Candidate]]) -> Table:
    kinds = " / ".join(dict.fromkeys(item.kv_dtype for item in found.candidates))
    table = _table("weights")
    state = max((item.state_bytes_per_sequence for item in found.candidates), default=0)
    also = f" + {gib(state)} per sequence" if state else ""
    for heading in (
        "bytes",
        f"KV per token: {kinds}{also}",
        f"memory for {found.concurrency} x {found.context:,}",
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


def _max_requests(items: list[Candidate]) -> Table:
    table = _table(f"requests that fit with {items[0].format}, by context")
    for item in items:
        table.add_column(f"{item.kv_dtype} KV", justify="right")
    for context in items[0].most_requests:
        table.add_row(f"{context:,}", *(f"{item.most_requests[context]:,}" for item in items))
    return table


def _grid(item: Candidate) -> Table:
    """Total tok/s of all requests: a row per context, a column per concurrency."""
    table = _table(f"total tok/s with {item.name}, by context and concurrency; -: does not fit")
    counts = next(iter(item.grid.values()))
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    for context, speeds in item.grid.items():
        max_requests = item.most_requests[context]
        cells = ["-" if count > max_requests else _speed(speed) for count, speed in speeds.items()]
        table.add_row(f"{context:,}", *cells)
    return table


def _speed(value: float | None) -> str:
    return "fits" if value is None else _rate(value)


def _memory(found: Plan, item: Candidate) -> Table:
    table = _table(f"memory of {item.name}, {found.concurrency} x {found.context:,} tokens")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    kv_bytes = item.options["kv_cache_memory_bytes"]
    spare = item.total_bytes - item.weight_bytes - kv_bytes - item.step_bytes - item.offload_bytes
    rows = [
        ("weights", item.weight_bytes - item.copy_bytes),
        (_COPIES, item.copy_bytes),
        ("KV cache", kv_bytes),
        ("largest step (estimate)", item.step_bytes),
        (_SPARE_BLOCKS, spare),
        (_OFFLOAD, item.offload_bytes),
        ("total", item.total_bytes),
        ("memory", found.memory_bytes),
        ("free" if item.fits else "missing", abs(found.memory_bytes - item.total_bytes)),
    ]
    for name, num_bytes in rows:
        if num_bytes or name not in (_COPIES, _SPARE_BLOCKS, _OFFLOAD):
            table.add_row(name, f"{num_bytes:,}", gib(num_bytes))
    return table


def _notes(found: Plan) -> list[str]:
    machine = found.machine
    gemm = "" if machine.flops is None else f", {machine.flops / 1e9:,.0f} GFLOP/s"
    bound = "" if machine.flops else " GEMM time is not counted, so speeds are upper limits."
    lines = [
        f"Memory: {gib(found.memory_bytes)} ({found.memory_source}); includes an estimate for steps "
        f"of up to {found.step_tokens:,} tokens, but not the process itself and captured graphs.",
        f"Speed: an estimate for full contexts from {machine.bandwidth / 1e9:,.1f} GB/s{gemm} "
        f"({machine.source}); {_factor(machine.factor)}.{bound}",
        "Quality: the 16-bit model's perplexity over the format's. m: measured, by windlass "
        "eval or bench formats; t: typical of models of 7 to 8 billion parameters; a: assumed; no "
        "letter: the reference.",
    ]
    copied = dict.fromkeys(item.format for item in found.candidates if item.copy_bytes)
    if copied:
        lines.append(
            f"16-bit copies of the weights are included with {', '.join(copied)}; "
            "--no-dequantized-copies omits them."
        )
    reasons: dict[str, list[str]] = {}
    for name, why in found.refused.items():
        reasons.setdefault(why, []).append(name)
    return [*lines, *(f"Not offered: {', '.join(names)}: {why}" for why, names in reasons.items())]


def _factor(factor: Factor) -> str:
    gemm = "" if factor.gemm_share == 1 else f", {factor.gemm_share:.2g} of the GEMM rate"
    layers = f", plus {factor.layer_seconds * 1e6:g} µs per layer" if factor.layer_seconds else ""
    return f"steps reach {factor.share:.2g} of the bandwidth{gemm}{layers} ({factor.source})"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _quality(item: Candidate) -> str:
    retention = item.quality
    if retention.value is None:
        return "?"
    letter = "" if retention.basis == "reference" else f" {retention.basis[0]}"
    return f"{retention.value:.3f}{letter}"


def show_scaling(found: ScalingPlan, command: str | None, *, explain: bool) -> None:
    """Print the layouts and the choice. `command` serves it; `explain` lists the assumptions."""
    console = wide_console()
    console.print(
        f"{found.model}, {found.format}, on {found.devices} x {found.gpu} with "
        f"{gib(found.memory_bytes)} each; contexts of {found.context:,} tokens"
    )
    console.print()
    console.print(_layouts(found))
    console.print()
    for name, why in found.refused.items():
        console.print(f"{name}: {why}")
    console.print(f"Times are a model, {found.checked}. --explain lists what it assumes.")
    if explain:
        console.print()
        for layout in found.layouts:
            if layout.fits and layout.expert_combine_ms:
                rules = layout.expert_combine_ms.items()
                times = ", ".join(f"{ms:,.2f} ms with {rule}" for rule, ms in rules)
                console.print(f"  experts of {layout.name}, a prompt's collectives: {times}")
            if layout.fits and layout.split_ttft_ms != layout.ttft_ms:
                console.print(
                    f"  {layout.name} with --enable-sequence-parallel: TTFT of {PROMPT:,} "
                    f"{layout.split_ttft_ms:,.1f} ms instead of {layout.ttft_ms:,.1f} ms"
                )
        for item in found.assumptions:
            console.print(f"  {item.name}: {item.value} [{item.source}]")
    console.print()
    if command is None:
        console.print(f"No choice: {found.reason}")
        return
    console.print(f"Recommended: {found.reason}")
    console.print(f"  {command}")


def _layouts(found: ScalingPlan) -> Table:
    table = _table("layout")
    batches = found.layouts[0].batches
    for heading in (
        "weights per GPU",
        "KV per token and GPU",
        "max tokens",
        *(f"tok/s x {each.requests}" for each in batches),
        f"TTFT of {PROMPT:,}, ms",
        f"TPOT x {found.concurrency}, ms",
        f"communication x {found.concurrency}",
        f"$ per M tokens x {found.concurrency}",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for layout in found.layouts:
        table.add_row(*_layout_cells(layout, found.concurrency))
    return table


def _layout_cells(layout: Layout, concurrency: int) -> list[str]:
    own = layout.batch(concurrency)
    cost = own.usd_per_million
    cells = [layout.name, gib(layout.weight_bytes), gib(layout.kv_token_bytes)]
    if not layout.fits:
        return [*cells, "does not fit"]
    return [
        *cells,
        f"{layout.max_tokens:,}",
        *(f"{each.tok_s:,.0f}" if each.fits else "-" for each in layout.batches),
        f"{layout.ttft_ms:,.1f}",
        f"{own.tpot_ms:,.2f}",
        f"{own.communication:.0%}",
        "-" if cost is None else f"{cost:,.2f}",
    ]


def prediction_lines(
    found: Prediction, max_concurrency: int | None, request_rate: float
) -> Iterator[str]:
    """Yield the lines to print for a predicted load."""
    limits, capacity, run = found.limits, found.capacity, found.run
    yield (
        f"Settings: {limits.max_num_seqs:,} sequences ({limits.seqs_reason}), "
        f"{limits.max_num_batched_tokens:,} tokens per step ({limits.tokens_reason}), "
        f"{capacity.num_blocks:,} blocks of {capacity.block_size} tokens ({capacity.reason})."
    )
    yield _costs(found)
    figures = found.summary.lines(max_concurrency=max_concurrency, request_rate=request_rate)
    yield " Predicted Serving Result ".center(_WIDTH, "=")
    yield from figures[1:-1]
    yield "KV cache and queue".center(_WIDTH, "-")
    yield line_of("KV in use, peak (%):", 100 * run.peak_kv)
    yield line_of("KV in use, mean (%):", 100 * run.mean_kv)
    yield line_of("Max requests waiting:", run.peak_waiting)
    yield line_of("Preemptions:", run.num_preemptions)
    yield line_of("Steps:", run.num_steps)
    yield "=" * _WIDTH
    for error, count in found.summary.errors.items():
        yield f"{count} would fail: {error}"
    yield from _slo_lines(found)


def _costs(found: Prediction) -> str:
    costs, rows = found.steps.costs, [n for n in _SHOWN_ROWS if n <= found.limits.max_num_seqs]
    steps = ", ".join(f"{n}: {1e3 * costs.decode_seconds(n, 128):.1f}" for n in rows)
    max_tokens = found.limits.max_num_batched_tokens
    sizes = [n for n in _SHOWN_TOKENS if n < max_tokens] + [max_tokens]
    prompts = ", ".join(f"{n}: {1e3 * costs.tokens.of(n):.0f}" for n in sizes)
    return (
        f"Step costs ({found.steps.source}): ms by decoding requests {steps}; by prefill tokens "
        f"{prompts}."
    )


def _slo_lines(found: Prediction) -> Iterator[str]:
    if not found.slo.targets:
        return
    misses = found.slo.misses(found.summary)
    yield f"SLO {found.slo}: " + ("met." if not misses else f"missed: {'; '.join(misses)}.")
    for fleet in found.fleets:
        verdict = "meets it" if not fleet.misses else f"misses it: {'; '.join(fleet.misses)}"
        yield (
            f"  {fleet.num_devices} x: {fleet.summary.output_throughput:,.1f} tok/s, goodput "
            f"{fleet.summary.request_goodput or 0.0:.2f} req/s, {verdict}"
        )
    if found.fleets:
        enough = next((fleet for fleet in found.fleets if not fleet.misses), None)
        yield (
            f"Devices needed: {enough.num_devices}, each with a copy of the model."
            if enough is not None
            else f"Not even {found.fleets[-1].num_devices} devices meet it: more devices only help "
            "while requests queue."
        )
