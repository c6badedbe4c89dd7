"""Tables for the terminal: the engine's start-up report, and the output of `inspect`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from windlass.core.card import EngineReport

Row = tuple[str, str, str]

_SHORT_S = 0.005
_UNITS = ("B", "KiB", "MiB", "GiB")


def print_report(report: EngineReport) -> None:
    """Print the engine's choices with their reasons, start-up times and memory."""
    table = make_table("What", "Value", "Why")
    for choice in report.choices:
        table.add_row(choice.what, choice.value, choice.reason)
    table.add_section()
    for phase, seconds in report.seconds.items():
        if seconds >= _SHORT_S:  # else there was nothing to do
            table.add_row(phase, f"{seconds:.2f} s", "time to start")
    table.add_section()
    for what, num_bytes in report.memory.items():
        table.add_row(what, readable_bytes(num_bytes), "memory")
    make_console().print(table)


def print_model_report(report: dict[str, Any]) -> None:
    """Print what `model_report.examine` returned: one table, and the tensors if requested."""
    table = make_table("What", "Value", "Details")
    for section in (_model_rows, _text_rows, _weight_rows, _kernel_rows):
        for row in section(report):
            table.add_row(*row)
        table.add_section()
    console = make_console()
    console.print(table)
    if "tensors" in report:
        listing = make_table("Tensor", "Format", "Shape", "Size")
        for item in report["tensors"]:
            shape = " x ".join(map(str, item["shape"]))
            listing.add_row(item["name"], item["format"], shape, readable_bytes(item["bytes"]))
        console.print(listing)


def readable_bytes(num_bytes: float) -> str:
    """720.0 KiB, 5.9 GiB"""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:,.{1 if unit else 0}f} {_UNITS[unit]}"


def counted(number: int, what: str) -> str:
    """1 layer, 30 layers"""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _model_rows(report: dict[str, Any]) -> list[Row]:
    model, hparams = report["model"], report["spec"]
    rows = [("model", model["name"], f"{model['kind']}: {model['path']}")]
    for item in model["weights"]:
        rows.append(("file", readable_bytes(item["bytes"]), item["path"]))
    if not model["weights"]:
        rows.append(("file", "none", "random weights (--load-format dummy)"))
    heads = f"{hparams['num_heads']} heads, {hparams['num_kv_heads']} KV heads"
    rows.append(
        ("architecture", hparams["architecture"], f"{hparams['num_layers']} layers, {heads}")
    )
    sizes = f"hidden {hparams['hidden_size']}, feed-forward {hparams['intermediate_size']}"
    rows.append(
        ("sizes", sizes, f"head {hparams['head_dim']}, vocabulary {hparams['vocab_size']:,}")
    )
    rope = hparams["rope"]
    positions = f"rope {rope['kind']}, theta {rope['theta']:g}"
    rows.append(("context", f"{hparams['max_positions']:,} tokens", positions))
    return rows


def _text_rows(report: dict[str, Any]) -> list[Row]:
    tokenizer, template = report["tokenizer"], report["chat_template"]
    ends = ", ".join(f"{token} {text!r}" for token, text in tokenizer["eos"].items())
    found = "present" if template["present"] else "none"
    remarks = [template["error"]] if template["error"] else template["remarks"]
    tried = "renders" if template["present"] else "windlass chat needs one"
    rows = [
        (
            "tokenizer",
            f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens",
            f"EOS {ends or 'none'}",
        ),
        ("chat template", found, "; ".join(remarks) or tried),
    ]
    for name, value in report["sampling_defaults"].items():
        rows.append((name, str(value), "sampling default of the model"))
    return rows


def _weight_rows(report: dict[str, Any]) -> list[Row]:
    return [
        (
            f"stored as {item['format']}",
            readable_bytes(item["bytes"]),
            counted(item["tensors"], "tensor"),
        )
        for item in report["formats"]
    ]


def _kernel_rows(report: dict[str, Any]) -> list[Row]:
    rows = [(item["what"], item["value"], item["reason"]) for item in report["choices"]]
    for item in report["kernels"]:
        refused = "; ".join(f"{name} refused: {why}" for name, why in item["refusals"].items())
        more = refused or "first choice"
        rows.append((item["operation"], item["kernel"], more))
    rows += [_layer_row(item) for item in report["linear_layers"]]
    estimate = report["estimate"]
    table = estimate["table_bytes"]
    own = "separate copy" if table else "shared with the head"
    rows.append(("embedding", readable_bytes(table) if table else "0 B", own))
    rows.append(("weights", readable_bytes(estimate["weight_bytes"]), "in memory"))
    rows.append(("KV cache", readable_bytes(estimate["kv_bytes_per_token"]), "per token"))
    state = estimate["state_bytes_per_sequence"]
    if state:
        rows.append(("recurrent states", readable_bytes(state), "per sequence"))
    return rows


def _layer_row(item: dict[str, Any]) -> Row:
    """mlp.down_proj | Q4_K as int4 | number, bytes, bits per weight, kernel."""
    stored, form = item["method"], item["form"]
    formats = form if stored == form else f"{stored} as {form}"
    count = f"{counted(item['layers'], 'weight')}, {readable_bytes(item['bytes'])}"
    bits = f"{item['bits_per_weight']:g} bits per weight"
    why = "" if item["reason"] in ("first choice", "not quantised") else f": {item['reason']}"
    name = item["layer"].removeprefix("model.layers.*.")
    return name, formats, f"{count}, {bits}, {item['kernel']}{why}"


def make_table(*columns: str) -> Table:
    table = Table()
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    return table


def make_console() -> Console:
    return Console(highlight=False, markup=False)
