"""Prints the layouts of a model on several GPUs as text."""

from __future__ import annotations

from rich.table import Table

from windlass.runner.device import gib
from windlass.tools.common.report import plain_table, wide_console
from windlass.tools.plan.scaling import PROMPT, Batch, Layout, ScalingPlan


def show_scaling(found: ScalingPlan, command: str | None, *, explain: bool) -> None:
    """Print the layouts and the choice. `command` serves it; `explain` lists the assumptions."""
    console = wide_console()
    console.print(
        f"{found.model}, {found.format}, on {found.devices} x {found.gpu} with "
        f"{gib(found.memory_bytes)} each; contexts of {found.context:,} tokens"
    )
    console.print()
    console.print(_table(found))
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


def _table(found: ScalingPlan) -> Table:
    table = plain_table()
    table.add_column("layout")
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
        table.add_row(*_row(layout, found.concurrency))
    return table


def _row(layout: Layout, concurrency: int) -> list[str]:
    own = layout.batch(concurrency)
    cost = own.usd_per_million
    cells = [layout.name, gib(layout.weight_bytes), gib(layout.kv_token_bytes)]
    if not layout.fits:
        return [*cells, "does not fit"]
    return [
        *cells,
        f"{layout.max_tokens:,}",
        *map(_speed, layout.batches),
        f"{layout.ttft_ms:,.1f}",
        f"{own.tpot_ms:,.2f}",
        f"{own.communication:.0%}",
        "-" if cost is None else f"{cost:,.2f}",
    ]


def _speed(batch: Batch) -> str:
    return f"{batch.tok_s:,.0f}" if batch.fits else "-"
