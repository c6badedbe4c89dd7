"""`windlass bench serve`: a load on any OpenAI-compatible server.

Flags have the names of `vllm bench serve`. Parsing only: what they mean is in tools/load.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.bench_points import numbers_of, points_of, seek_share
from windlass.cli.bench_report import report
from windlass.cli.command import PanelCommand, reported
from windlass.cli.options import parse_share, split_names
from windlass.cli.results import check_path
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.load.program import ServeOrder

_SUFFIXES = (".json", ".csv", ".html")
_SEVERAL = ("--goodput", "--lora-modules")
_BACKENDS = {
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
}


class ServeCommand(PanelCommand):
    """Takes `--goodput ttft:500 tpot:40` as others do: one flag, several words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        folded: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word if word in _SEVERAL else ""
                folded.append(word)
            elif flag and folded[-1] != flag:
                folded += [flag, word]
            else:
                folded.append(word)
        return super().parse_args(ctx, folded)


Text = str | None
_LOAD, _ARRIVALS, _RESULTS = "Load", "Arrivals", "Results"


def _option(panel: str, metavar: str, help: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


def serve(
    ctx: typer.Context,
    base_url: Annotated[
        Text, _option("Server", "URL", "The server; over --host, --port.", "--base-url", "--url")
    ] = None,
    host: Annotated[str, _option("Server", "ADDRESS", "Where it listens.")] = "127.0.0.1",
    port: Annotated[int, _option("Server", "N", "Where it listens.")] = 8000,
    backend: Annotated[
        str, _option("Server", "NAME", "openai-chat, openai, vllm.")
    ] = "openai-chat",
    endpoint: Annotated[Text, _option("Server", "PATH", "Default: the backend's.")] = None,
    model: Annotated[Text, _option("Server", "NAME", "Default: the server's first.")] = None,
    api_key: Annotated[Text, _option("Server", "KEY", "Default: $OPENAI_API_KEY.")] = None,
    header: Annotated[
        list[str] | None, _option("Server", "NAME=VALUE", "Sent along; may be repeated.")
    ] = None,
    ready_check_timeout_sec: Annotated[
        float, _option("Server", "S", "How long to wait for the server.")
    ] = 10.0,
    request_timeout: Annotated[float, _option("Server", "S", "Longest of a request.")] = 600.0,
    max_retries: Annotated[
        int, _option("Server", "N", "Try again after 429, as Retry-After says; 0: it has failed.")
    ] = 0,
    dataset_name: Annotated[
        str,
        _option(
            _LOAD,
            "NAME",
            "chat, shared_prefix, rag, few_shot, long_document, code_edit, random; "
            "from a file: custom, timed_trace, sharegpt.",
            *("--dataset-name", "--workload"),
        ),
    ] = "random",
    dataset_path: Annotated[Path | None, _option(_LOAD, "FILE", "For those from a file.")] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave them out.", rich_help_panel=_LOAD)
    ] = False,
    num_prompts: Annotated[int, _option(_LOAD, "N", "Requests of a run.")] = 64,
    input_len: Annotated[
        int | None,
        _option(
            _LOAD, "N", "Prompt tokens; default: the load's.", "--input-len", "--random-input-len"
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        _option(
            _LOAD,
            "N",
            "Most tokens out; default: the load's.",
            "--output-len",
            "--random-output-len",
        ),
    ] = None,
    prefix_len: Annotated[
        int | None,
        _option(_LOAD, "N", "Tokens that prompts share.", "--prefix-len", "--random-prefix-len"),
    ] = None,
    range_ratio: Annotated[
        float,
        _option(_LOAD, "R", "Lengths R below to R above.", "--range-ratio", "--random-range-ratio"),
    ] = 0.0,
    turns: Annotated[int | None, _option(_LOAD, "N", "Turns of a chat; default: 4.")] = None,
    tokens_per_word: Annotated[
        float | None, _option(_LOAD, "R", "Default: the server's tokenizer is asked.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None, _option(_LOAD, "NAME", "Adapters; each request gets one of them.")
    ] = None,
    temperature: Annotated[float | None, _option(_LOAD, "T", "Default: the server's.")] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="All tokens that were asked for.", rich_help_panel=_LOAD),
    ] = False,
    extra_body: Annotated[Text, _option(_LOAD, "JSON", "Fields for every request.")] = None,
    seed: Annotated[int, _option(_LOAD, "N", "Texts and arrivals follow from it.")] = 0,
    num_warmups: Annotated[int, _option(_LOAD, "N", "Requests before, not counted.")] = 0,
    request_rate: Annotated[
        str,
        _option(
            _ARRIVALS,
            "R",
            "A second; several with commas are a sweep; inf: at once; auto: the highest at which "
            "--goodput-share of the requests meet --goodput.",
        ),
    ] = "inf",
    arrivals: Annotated[
        Text,
        _option(_ARRIVALS, "NAME", "poisson, constant, burst, trace; default: poisson, or trace."),
    ] = None,
    burstiness: Annotated[
        float, _option(_ARRIVALS, "B", "1: Poisson; below: in clumps; above: more even.")
    ] = 1.0,
    burst_size: Annotated[int, _option(_ARRIVALS, "N", "Requests of a burst.")] = 8,
    max_concurrency: Annotated[
        Text, _option(_ARRIVALS, "N", "Most under way at once; several with commas are a sweep.")
    ] = None,
    ramp_up_strategy: Annotated[Text, _option(_ARRIVALS, "NAME", "linear, exponential.")] = None,
    ramp_up_start_rps: Annotated[float | None, _option(_ARRIVALS, "R", "First rate.")] = None,
    ramp_up_end_rps: Annotated[float | None, _option(_ARRIVALS, "R", "Last rate.")] = None,
    trace_speed: Annotated[float, _option(_ARRIVALS, "X", "2: in half the time.")] = 1.0,
    goodput: Annotated[
        list[str] | None, _option(_RESULTS, "NAME:MS", "ttft:500 tpot:40 e2el:9000.")
    ] = None,
    goodput_share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --request-rate auto; default: 0.95.",
            rich_help_panel=_RESULTS,
            parser=parse_share,
        ),
    ] = None,
    probe_request_rate: Annotated[
        float,
        _option(_RESULTS, "R", "Beside the load, requests of one token; told apart from it."),
    ] = 0.0,
    percentile_metrics: Annotated[
        str, _option(_RESULTS, "NAMES", "Sections to print.")
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, _option(_RESULTS, "NUMBERS", "With commas.")] = "90,99",
    label: Annotated[Text, _option(_RESULTS, "NAME", "This engine's name in reports.")] = None,
    output: Annotated[
        list[Path] | None,
        _option(_RESULTS, "FILE", ".json, .csv or .html; may be repeated.", "-o", "--output"),
    ] = None,
    save_result: Annotated[
        bool,
        typer.Option(
            "--save-result", help="JSON and CSV in --result-dir.", rich_help_panel=_RESULTS
        ),
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option("--save-detailed", help="Every request too.", rich_help_panel=_RESULTS),
    ] = False,
    result_dir: Annotated[Path, _option(_RESULTS, "DIR", "Where results go.")] = Path("."),
) -> None:
    """Load an OpenAI-compatible server, whoever's it is, and measure what its clients see."""
    given = dict(locals())
    with reported(ctx):
        files = _files(given)
        order = _order(given)
        from windlass.tools.load.live import Progress
        from windlass.tools.load.program import measure

        served = measure(order, typer.echo, Progress())
        _write(served.record, files)
        code = 130 if served.stopped == "interrupted" else int(bool(served.stopped))
        if not served.stopped and not served.is_good:
            code = 1
    raise typer.Exit(code)


def _order(given: dict[str, Any]) -> ServeOrder:
    from windlass.tools.load.client import Wishes
    from windlass.tools.load.program import Load, ServeOrder
    from windlass.tools.load.summary import METRICS, parse_goodput
    from windlass.tools.load.workloads import Sizes

    names = ("num_prompts", "input_len", "output_len", "prefix_len", "turns", "range_ratio")
    base_url = given["base_url"] or f"http://{given['host']}:{given['port']}"
    metrics = split_names(given["percentile_metrics"])
    unknown = [name for name in metrics if name not in METRICS]
    if unknown:
        known = ", ".join(METRICS)
        raise ConfigError(f"--percentile-metrics {unknown[0]!r} is not known. Known: {known}.")
    if given["backend"] not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ConfigError(f"--backend {given['backend']!r} is not known. Known: {known}.")
    endpoint = given["endpoint"] or _BACKENDS[given["backend"]]
    if not endpoint.startswith("/") or not endpoint.rstrip("/").endswith("completions"):
        raise ConfigError(
            f"--endpoint {endpoint!r}: expected such as /v1/chat/completions or /v1/completions."
        )
    for name in ("request_timeout", "num_warmups", "max_retries", "probe_request_rate"):
        if given[name] < 0 or (name == "request_timeout" and given[name] == 0):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be {given[name]:g}.")
    wishes = Wishes(
        given["model"] or "",
        endpoint,
        given["temperature"],
        given["ignore_eos"],
        _json_object("--extra-body", given["extra_body"]),
        given["request_timeout"],
        given["max_retries"],
    )
    load = Load(
        given["dataset_name"],
        Sizes(**{name: given[name] for name in names}),
        given["dataset_path"],
        given["skip_bad_lines"],
        given["tokens_per_word"],
        tuple(split_names(",".join(given["lora_modules"] or []))),
    )
    return ServeOrder(
        base_url,
        wishes,
        load,
        points_of(given),
        given["label"] or "",
        _headers(given),
        given["num_warmups"],
        given["ready_check_timeout_sec"],
        parse_goodput(given["goodput"] or []),
        numbers_of("--metric-percentiles", given["metric_percentiles"], most=100),
        metrics,
        given["seed"],
        given["save_detailed"],
        seek_share(given),
        given["probe_request_rate"],
    )


def _headers(given: dict[str, Any]) -> dict[str, str]:
    headers = {}
    key = given["api_key"] or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for item in given["header"] or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header {item!r}: expected NAME=VALUE.")
        headers[name] = value
    return headers


def _files(given: dict[str, Any]) -> list[Path]:
    """Where results go; refused now when one cannot be written."""
    files = list(given["output"] or [])
    if given["save_result"]:
        parts = (
            given["label"] or "serve",
            given["dataset_name"],
            f"{datetime.now():%Y%m%d-%H%M%S}",
        )
        stem = "-".join(part.replace("/", "-") for part in parts)
        files += [given["result_dir"] / f"{stem}{suffix}" for suffix in (".json", ".csv")]
    elif given["result_dir"] != Path("."):
        raise ConfigError("--result-dir means something only with --save-result; or use -o FILE.")
    for path in files:
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"-o {path}: expected a name that ends in {', '.join(_SUFFIXES)}.")
        check_path("-o", path)
        if path.suffix == ".html":
            from windlass.tools.load.page import plotly_js

            plotly_js()  # refused before anything is measured when it is not installed
    return files


def _write(record: Any, files: list[Path]) -> None:
    from windlass.tools.load.report import save_report
    from windlass.tools.load.rows import save_csv

    for path in files:
        if path.suffix == ".json":
            record.save(path)
        elif path.suffix == ".csv":
            save_csv(record.rows, path)
        else:
            save_report([record], path)
        typer.echo(f"written to {path}", err=True)
    if len(record.rows) > 1:
        from windlass.tools.bench.columns import show

        show(record)


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    import json

    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text!r}: is no JSON object.")
    return value


def add_to(app: typer.Typer) -> None:
    """This command and that for its pages, to the bench app."""
    app.command(cls=ServeCommand)(serve)
    app.command(cls=PanelCommand)(report)
