"""The `windlass` command. Each command has its own module and imports torch and rich when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from windlass.cli.balance_experts import balance_experts
from windlass.cli.bench import app as bench
from windlass.cli.cache import app as cache
from windlass.cli.chat import chat
from windlass.cli.cluster import app as cluster
from windlass.cli.command import CommandGroup, PanelCommand, register
from windlass.cli.compile import compile as compile_kernels
from windlass.cli.config import config
from windlass.cli.doctor import doctor
from windlass.cli.eval import eval as evaluate
from windlass.cli.flags import switch
from windlass.cli.generate import generate
from windlass.cli.inspect import inspect
from windlass.cli.keys import keys
from windlass.cli.ladder import LADDER_OPTIONS, ladder
from windlass.cli.options import (
    ENGINE_OPTIONS,
    GATE_OPTIONS,
    GRAMMAR_OPTIONS,
    LIMIT_OPTIONS,
    LORA_OPTIONS,
    PARALLEL_OPTIONS,
    SERVE_OPTIONS,
)
from windlass.cli.plan import PLAN_OPTIONS, plan
from windlass.cli.profile import profile
from windlass.cli.quantize import QUANTIZE_OPTIONS, quantize
from windlass.cli.remote import add_to as add_remote
from windlass.cli.run_batch import RUN_BATCH_OPTIONS, run_batch
from windlass.cli.sampling import SAMPLING_OPTIONS
from windlass.cli.serve import serve
from windlass.cli.train_draft import TRAIN_DRAFT_OPTIONS, train_draft
from windlass.cli.tune import TUNE_OPTIONS, tune
from windlass.version import __version__

_SECTIONS = {
    "Run": ("serve", "chat", "generate", "run-batch", "cluster"),
    "Prepare": ("doctor", "inspect", "plan", "tune", "config", "compile", "keys", "cache"),
    "Measure": ("bench", "eval", "ladder", "profile"),
    "Make": ("quantize", "train-draft", "balance-experts"),
    "Look at a running server": ("explain", "memory", "usage"),
}


class _Commands(CommandGroup):
    sections = _SECTIONS


app = typer.Typer(
    name="windlass",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"windlass {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, switch("Print the version.", "--version", callback=_show_version, is_eager=True)
    ] = False,
    traceback: Annotated[
        bool, switch("Show errors with a traceback.", "--traceback", envvar="WINDLASS_TRACEBACK")
    ] = False,
) -> None:
    """Serve open-weight language models on your own hardware, and measure what each optimisation gives.

    `windlass serve` without a model fetches a small one (93 MB) and serves it at http://127.0.0.1:8000.
    """


_MODEL_OPTIONS = [*ENGINE_OPTIONS, *LORA_OPTIONS, *GRAMMAR_OPTIONS, *PARALLEL_OPTIONS]

register(app, serve, [*_MODEL_OPTIONS, *SERVE_OPTIONS, *GATE_OPTIONS])
register(app, config, [*_MODEL_OPTIONS, *SERVE_OPTIONS, *GATE_OPTIONS])
register(app, chat, [*SAMPLING_OPTIONS, *_MODEL_OPTIONS])
register(app, generate, [*SAMPLING_OPTIONS, *_MODEL_OPTIONS])
register(app, run_batch, [*_MODEL_OPTIONS, *RUN_BATCH_OPTIONS])
register(app, inspect, ENGINE_OPTIONS)
register(app, compile_kernels, _MODEL_OPTIONS)
register(app, evaluate, [*LIMIT_OPTIONS, *ENGINE_OPTIONS])
register(app, ladder, LADDER_OPTIONS)
register(app, plan, PLAN_OPTIONS)
register(app, profile, ENGINE_OPTIONS)
register(app, quantize, QUANTIZE_OPTIONS)
register(app, train_draft, TRAIN_DRAFT_OPTIONS)
register(app, tune, TUNE_OPTIONS)
add_remote(app)
app.command("doctor", cls=PanelCommand)(doctor)
app.command("keys", cls=PanelCommand)(keys)
app.command("balance-experts", cls=PanelCommand)(balance_experts)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")
app.add_typer(cluster, name="cluster")
