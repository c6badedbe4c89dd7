"""What a running server told, for people: one request's timeline, and the memory's ledger."""

from __future__ import annotations

from typing import Any

import typer

from windlass.cli.report import counted, make_console, make_table, readable_bytes

Json = dict[str, Any]


def print_explanation(told: Json) -> None:
    """The sentence first, then the facts of each completion."""
    shown = make_console()
    typer.echo(told["sentence"])
    setting = told["setting"]
    if setting is not None:
        typer.echo(
            f"It would have helped: {setting['flag']} {setting['value']} ({setting['why']})."
        )
    for item in told["completions"]:
        table = make_table("What", "Seconds", "More")
        for row in _rows(item):
            table.add_row(*row)
        if len(told["completions"]) > 1:
            shown.print(f"\nCompletion {item['index']}")
        shown.print(table)


def _rows(item: Json) -> list[tuple[str, str, str]]:
    seconds, queue, prompt, decode = (
        item[name] for name in ("seconds", "queue", "prompt", "decode")
    )
    ahead = f"{counted(queue['ahead'], 'request')} ahead, {queue['running']} running"
    rows = [
        ("server", _s(seconds["server"]), "template, tokens, the way to the engine"),
        ("queued", _s(seconds["queued"]), ahead),
    ]
    for blocker, waited in queue["blocked_by"].items():
        rows.append((f"  for {blocker}", _s(waited), _lacked(blocker, queue)))
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
            f"{counted(lost['count'], 'preemption')}; {lost['recomputed_tokens']:,} tokens again "
            f"in {lost['recomputed_seconds']:.3f} s"
        )
        rows.append(("preempted", _s(lost["waited_seconds"]), more))
    if "drafts" in item:
        rows.append(("drafts", "", _drafts(item["drafts"])))
    rows.append(("total", _s(seconds["total"]), f"ended by {item['finish'] or 'nothing yet'}"))
    if "cost" in item:
        cost = item["cost"]
        rows.append(("cost", "", f"${cost['usd']:.3g}; the cache saved ${cost['saved_usd']:.3g}"))
    return rows


def _lacked(blocker: str, queue: Json) -> str:
    if blocker == "blocks" and queue["blocks_short"]:
        return f"{counted(queue['blocks_short'], 'block')} were lacking"
    return "the one being computed when it came" if blocker == "step" else ""


def _prompt(item: Json, prompt: Json) -> str:
    text = f"{item['prompt_tokens']:,} tokens, {prompt['cached_tokens']:,} of them cached"
    if prompt["first_missed"] is None:
        return text
    return f"{text}; missed from {prompt['first_missed']:,} on: {prompt['why_missed']}"


def _decode(item: Json, decode: Json) -> str:
    text = counted(item["output_tokens"], "token")
    if decode["seconds_per_token"] is not None:
        text += f", {1e3 * decode['seconds_per_token']:.1f} ms each"
    batch = decode["batch"]
    if batch["min"] is not None:
        text += f"; rows in a step: {batch['min']} to {batch['max']}, median {batch['median']}"
    if decode["seconds_beside_prompts"]:
        text += f"; {decode['seconds_beside_prompts']:.3f} s beside prompts"
    return text


def _drafts(drafts: Json) -> str:
    places = ", ".join(f"{at['accepted']}/{at['proposed']}" for at in drafts["per_position"])
    return f"{drafts['accepted']} of {drafts['proposed']} accepted; by position {places}"


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"


def print_memory(told: Json) -> None:
    """Parts, then blocks, then what is left over."""
    shown = make_console()
    if told["state"] != "awake":
        shown.print(f"The server is {told['state']} (level {told['level']}).")
    if told["blocks"] is None:
        return
    table = make_table("What", "Bytes", "More")
    for name, part in (told["parts"] or {}).items():
        inside = part["resident"]
        more = "" if inside is None else f"{readable_bytes(inside)} in memory now"
        table.add_row(name, readable_bytes(part["num_bytes"]), more)
    if told["parts"] is not None:
        table.add_row("files", readable_bytes(told["file_bytes"]), "libraries, mapped")
        other = readable_bytes(told["unaccounted_bytes"])
        table.add_row("unaccounted", other, "interpreter, allocator, other tables")
        table.add_row("total", readable_bytes(told["total_bytes"]), f"held on {told['device']}")
        if told["device_free_bytes"] is not None:
            table.add_row("free", readable_bytes(told["device_free_bytes"]), "of the device")
        table.add_section()
    blocks = told["blocks"]
    for name, what in (
        ("used", "by running requests"),
        ("cached", "free, with prefixes to be found"),
        ("free", "empty"),
    ):
        count = counted(blocks[name]["blocks"], "KV block")
        table.add_row(f"KV {name}", readable_bytes(blocks[name]["bytes"]), f"{count} {what}")
    unfilled = blocks["unfilled"]
    more = f"{counted(unfilled['tokens'], 'token')} of room in last blocks"
    table.add_row("KV unfilled", readable_bytes(unfilled["bytes"]), more)
    shown.print(table)
