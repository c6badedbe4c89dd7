"""Prints a request's explanation, and a server's memory and usage reports, as tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import typer
from rich.table import Table

from windlass.cli.report import counted, make_console, make_table, readable_bytes

Json = dict[str, Any]


def print_explanation(explanation: Json) -> None:
    """Print the summary sentence, then the timeline of each completion."""
    shown = make_console()
    typer.echo(explanation["sentence"])
    setting = explanation["setting"]
    if setting is not None:
        typer.echo(
            f"This setting would have helped: {setting['flag']} {setting['value']} ({setting['why']})."
        )
    for item in explanation["completions"]:
        table = make_table("What", "Seconds", "More")
        for row in _rows(item):
            table.add_row(*row)
        if len(explanation["completions"]) > 1:
            shown.print(f"\nCompletion {item['index']}")
        shown.print(table)


def _rows(item: Json) -> list[tuple[str, str, str]]:
    seconds, queue, prompt, decode = (
        item[name] for name in ("seconds", "queue", "prompt", "decode")
    )
    ahead = f"{counted(queue['ahead'], 'request')} ahead, {queue['running']} running"
    rows = [
        ("server", _s(seconds["server"]), "chat template, tokenizer, transfer to the engine"),
        ("queued", _s(seconds["queued"]), ahead),
    ]
    for blocker, waited in queue["blocked_by"].items():
        rows.append((f"  for {blocker}", _s(waited), _shortage(blocker, queue)))
    rows.append(("prompt", _s(seconds["prefill"]), _prompt(item, prompt)))
    for chunk in prompt["chunks"]:
        what = f"  from {chunk['start']:,}"
        more = (
            f"{counted(chunk['num_tokens'], 'token')} in a step of {chunk['step_tokens']:,}, "
            f"{counted(chunk['step_rows'], 'row')}"
        )
        rows.append((what, _s(chunk["seconds"]), more))
    rows.append(("decode", _s(seconds["decode"]), _decode(item, decode)))
    if "preemptions" in item:
        lost = item["preemptions"]
        more = (
            f"{counted(lost['count'], 'preemption')}; {lost['recomputed_tokens']:,} tokens recomputed "
            f"in {lost['recomputed_seconds']:.3f} s"
        )
        rows.append(("preempted", _s(lost["waited_seconds"]), more))
    if "drafts" in item:
        rows.append(("drafts", "", _drafts(item["drafts"])))
    rows.append(
        ("total", _s(seconds["total"]), f"finish reason: {item['finish'] or 'not finished'}")
    )
    if "cost" in item:
        cost = item["cost"]
        rows.append(("cost", "", f"${cost['usd']:.3g}; the cache saved ${cost['saved_usd']:.3g}"))
    return rows


def _shortage(blocker: str, queue: Json) -> str:
    if blocker == "blocks" and queue["blocks_short"]:
        return f"{counted(queue['blocks_short'], 'block')} short"
    return "the step that was running on arrival" if blocker == "step" else ""


def _prompt(item: Json, prompt: Json) -> str:
    text = f"{item['prompt_tokens']:,} tokens, {prompt['cached_tokens']:,} cached"
    if prompt["first_missed"] is None:
        return text
    return f"{text}; first miss at {prompt['first_missed']:,}: {prompt['why_missed']}"


def _decode(item: Json, decode: Json) -> str:
    text = counted(item["output_tokens"], "token")
    if decode["seconds_per_token"] is not None:
        text += f", {1e3 * decode['seconds_per_token']:.1f} ms each"
    batch = decode["batch"]
    if batch["min"] is not None:
        text += f"; rows per step: {batch['min']} to {batch['max']}, median {batch['median']}"
    if decode["seconds_beside_prompts"]:
        text += f"; {decode['seconds_beside_prompts']:.3f} s in steps with prompts"
    return text


def _drafts(drafts: Json) -> str:
    by_position = ", ".join(f"{at['accepted']}/{at['proposed']}" for at in drafts["per_position"])
    return f"{drafts['accepted']} of {drafts['proposed']} accepted; by position {by_position}"


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"


def print_memory(report: Json) -> None:
    """Print the memory of each replica."""
    shown = make_console()
    if report["state"] != "awake":
        shown.print(f"The server is {report['state']} (level {report['level']}).")
    for each in report.get("replicas", [report]):
        if "replica" in each:
            shown.print(f"Replica {each['replica']}")
        if each["blocks"] is not None:
            shown.print(_memory_table(each))
        if each.get("adapters"):
            shown.print(_adapter_table(each["adapters"]))


def _memory_table(report: Json) -> Table:
    """The memory by owner, then the KV blocks."""
    table = make_table("What", "Bytes", "More")
    for name, part in (report["parts"] or {}).items():
        resident = part["resident"]
        more = "" if resident is None else f"{readable_bytes(resident)} resident"
        table.add_row(name, readable_bytes(part["num_bytes"]), more)
    if report["parts"] is not None:
        table.add_row("files", readable_bytes(report["file_bytes"]), "mapped libraries")
        other = readable_bytes(report["unaccounted_bytes"])
        table.add_row("unaccounted", other, "interpreter, allocator, small tables")
        table.add_row(
            "total", readable_bytes(report["total_bytes"]), f"allocated on {report['device']}"
        )
        if report["device_free_bytes"] is not None:
            table.add_row("free", readable_bytes(report["device_free_bytes"]), "on the device")
        table.add_section()
    blocks = report["blocks"]
    for name, what in (
        ("used", "by running requests"),
        ("cached", "free, with cached prefixes"),
        ("free", "empty"),
    ):
        count = counted(blocks[name]["blocks"], "KV block")
        table.add_row(f"KV {name}", readable_bytes(blocks[name]["bytes"]), f"{count} {what}")
    unfilled = blocks["unfilled"]
    more = f"{counted(unfilled['tokens'], 'token')} of space in the last blocks"
    table.add_row("KV unfilled", readable_bytes(unfilled["bytes"]), more)
    return table


_PLACES = {"device": "on the device", "memory": "in host memory", "disk": "on disk"}


def _adapter_table(adapters: list[Json]) -> Table:
    """The LoRA adapters: where each is, its size, and its requests."""
    table = make_table("Adapter", "Where", "Rank", "Bytes", "Running", "Queued", "Requests")
    for each in adapters:
        is_read = each["rank"] is not None
        table.add_row(
            each["name"],
            _PLACES[each["place"]],
            str(each["rank"]) if is_read else "",
            readable_bytes(each["bytes"]) if is_read else "",
            *(f"{each[name]:,}" for name in ("running", "waiting", "requests")),
        )
    return table


def print_usage(report: Json) -> None:
    """Print requests, tokens and costs, a row per bucket, tenant, key and model."""
    table = make_table(
        "Start (UTC)", "Tenant", "Key", "Model", "Requests", "Prompt", "Cached", "Output", "USD"
    )
    for row in report["data"]:
        start = datetime.fromtimestamp(row["start"], UTC).strftime("%Y-%m-%d %H:%M")
        counts = (
            row[name] for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
        )
        table.add_row(
            start,
            row["tenant"],
            row["key_id"],
            row["model"],
            *(f"{count:,}" for count in counts),
            f"{row['usd']:.6f}",
        )
    make_console().print(table)
