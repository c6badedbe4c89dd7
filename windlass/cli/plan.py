"""`windlass plan`: which formats of a model fit, how fast and how good they would be, and the choice.

Planning and printing are in tools/plan; this reads the flags and writes the command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.options import ENGINE_OPTIONS, parse_share, parse_size
from windlass.config import flag
from windlass.errors import ConfigError

# What decides how a model is held is what is planned; the rest is taken over into the command.
_PLANNED = (
    "quantization",
    "quantize_head",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "num_blocks",
    "memory_share",
    "max_model_len",
    "max_num_seqs",
)
PLAN_OPTIONS = [option for option in ENGINE_OPTIONS if option.name not in _PLANNED]
_SECRETS = ("hf_token",)
_RECORDS = Path("benchmarks")


def parse_bandwidth(text: str) -> float:
    """Bytes a second from 4800GB/s or 4.8TB/s."""
    return float(parse_size(text.strip().removesuffix("/s")))


def plan(
    options: Options,
    memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size, metavar="SIZE", help="Memory for everything; default: what is free."
        ),
    ] = None,
    min_quality: Annotated[
        float,
        typer.Option(
            parser=parse_share,
            metavar="SHARE",
            help="Least share of the 16-bit model's quality to keep: 0.95 or 95%.",
        ),
    ] = 0.0,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a request [default: 4096, or the model's]."),
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", help="Requests at once.")] = 8,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(metavar="auto|fp8|int8", help="Only this KV type; default: all.")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Only these, with commas: as stored,int8,int4+head."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            parser=parse_bandwidth,
            metavar="RATE",
            help="Plan for a device that reads so fast, such as 4800GB/s; default: measured here.",
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Results of windlass eval; default: benchmarks/ where there is one.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything here.")
    ] = None,
) -> int:
    """Show which formats of a model fit into a memory, and the command for the best.

    No weight is read. Bytes of weights and keys and values are exact, speeds are estimates, quality
    is measured or typical and says which. Exit code 1: nothing fits, or nothing is good enough.
    """
    from windlass.tools.plan.formats import FORMATS
    from windlass.tools.plan.select import select_quantization
    from windlass.tools.plan.show import show

    found = select_quantization(
        **options.engine_values(),
        memory=memory,
        min_quality=min_quality,
        context=context,
        concurrency=concurrency,
        kv_cache_dtype=kv_cache_dtype,
        bandwidth=bandwidth,
        formats=FORMATS if formats is None else _names(formats),
        records=records or (_RECORDS if _RECORDS.is_dir() else None),
    )
    command = serve_command(options.engine_values(), found.best.options) if found.best else None
    if output is not None:
        _write(output, asdict(found) | {"command": command})
    show(found, command)
    return 0 if found.best else 1


def serve_command(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    """The words that serve the model as planned; a token is not repeated."""
    rest = {name: value for name, value in given.items() if name not in ("model", *_SECRETS)}
    words = ["windlass", "serve", *([str(given["model"])] if "model" in given else [])]
    for name, value in {**rest, **chosen}.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else f"--no-{flag(name).removeprefix('--')}")
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else str(value)
            words += [flag(name), text]
    return shlex.join(words)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _write(path: Path, values: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}.") from error
