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
from windlass.cli.command import PanelCommand, reported
from windlass.cli.flags import option, split_names, switch
from windlass.cli.options import parse_share
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


def serve(
    ctx: typer.Context,
    base_url: Annotated[
        Text,
        option("URL", "The server; over --host, --port.", "--base-url", "--url", panel="Server"),
    ] = None,
    host: Annotated[str, option("ADDRESS", "Where it listens.", panel="Server")] = "127.0.0.1",
    port: Annotated[int, option("N", "Where it listens.", panel="Server")] = 8000,
    backend: Annotated[
        str, option("NAME", "openai-chat, openai, vllm.", panel="Server")
    ] = "openai-chat",
    endpoint: Annotated[Text, option("PATH", "Default: the backend's.", panel="Server")] = None,
    model: Annotated[Text, option("NAME", "Default: the server's first.", panel="Server")] = None,
    api_key: Annotated[Text, option("KEY", "Default: $OPENAI_API_KEY.", panel="Server")] = None,
    header: Annotated[
        list[str] | None, option("NAME=VALUE", "Sent along; may be repeated.", panel="Server")
    ] = None,
    ready_check_timeout_sec: Annotated[
        float, option("S", "How long to wait for the server.", panel="Server")
    ] = 10.0,
    request_timeout: Annotated[float, option("S", "Longest of a request.", panel="Server")] = 600.0,
    max_retries: Annotated[
        int,
        option("N", "Try again after 429, as Retry-After says; 0: it has failed.", panel="Server"),
    ] = 0,
    dataset_name: Annotated[
        str,
        option(
            "NAME",
            "chat, shared_prefix, rag, few_shot, long_document, code_edit, random; "
            "from a file: custom, timed_trace, sharegpt.",
            *("--dataset-name", "--workload"),
            panel=_LOAD,
        ),
    ] = "random",
    dataset_path: Annotated[
        Path | None, option("FILE", "For those from a file.", panel=_LOAD)
    ] = None,
    skip_bad_lines: Annotated[
        bool, switch("Leave them out.", "--skip-bad-lines", panel=_LOAD)
    ] = False,
    num_prompts: Annotated[int, option("N", "Requests of a run.", panel=_LOAD)] = 64,
    input_len: Annotated[
        int | None,
        option(
            "N",
            "Prompt tokens; default: the load's.",
            "--input-len",
            "--random-input-len",
            panel=_LOAD,
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        option(
            "N",
            "Most tokens out; default: the load's.",
            "--output-len",
            "--random-output-len",
            panel=_LOAD,
        ),
    ] = None,
    prefix_len: Annotated[
        int | None,
        option(
            "N", "Tokens that prompts share.", "--prefix-len", "--random-prefix-len", panel=_LOAD
        ),
    ] = None,
    range_ratio: Annotated[
        float,
        option(
            "R", "Lengths R below to R above.", "--range-ratio", "--random-range-ratio", panel=_LOAD
        ),
    ] = 0.0,
    turns: Annotated[int | None, option("N", "Turns of a chat; default: 4.", panel=_LOAD)] = None,
    tokens_per_word: Annotated[
        float | None, option("R", "Default: the server's tokenizer is asked.", panel=_LOAD)
    ] = None,
    lora_modules: Annotated[
        list[str] | None, option("NAME", "Adapters; each request gets one of them.", panel=_LOAD)
    ] = None,
    temperature: Annotated[float | None, option("T", "Default: the server's.", panel=_LOAD)] = None,
    ignore_eos: Annotated[
        bool, switch("All tokens that were asked for.", "--ignore-eos", panel=_LOAD)
    ] = False,
    extra_body: Annotated[Text, option("JSON", "Fields for every request.", panel=_LOAD)] = None,
    seed: Annotated[int, option("N", "Texts and arrivals follow from it.", panel=_LOAD)] = 0,
    num_warmups: Annotated[int, option("N", "Requests before, not counted.", panel=_LOAD)] = 0,
    request_rate: Annotated[
        str,
        option(
            "R",
            "A second; several with commas are a sweep; inf: at once; auto: the highest at which "
            "--goodput-share of the requests meet --goodput.",
            panel=_ARRIVALS,
        ),
    ] = "inf",
    arrivals: Annotated[
        Text,
        option(
            "NAME", "poisson, constant, burst, trace; default: poisson, or trace.", panel=_ARRIVALS
        ),
    ] = None,
    burstiness: Annotated[
        float, option("B", "1: Poisson; below: in clumps; above: more even.", panel=_ARRIVALS)
    ] = 1.0,
    burst_size: Annotated[int, option("N", "Requests of a burst.", panel=_ARRIVALS)] = 8,
    max_concurrency: Annotated[
        Text,
        option("N", "Most under way at once; several with commas are a sweep.", panel=_ARRIVALS),
    ] = None,
    ramp_up_strategy: Annotated[
        Text, option("NAME", "linear, exponential.", panel=_ARRIVALS)
    ] = None,
    ramp_up_start_rps: Annotated[float | None, option("R", "First rate.", panel=_ARRIVALS)] = None,
    ramp_up_end_rps: Annotated[float | None, option("R", "Last rate.", panel=_ARRIVALS)] = None,
    trace_speed: Annotated[float, option("X", "2: in half the time.", panel=_ARRIVALS)] = 1.0,
    goodput: Annotated[
        list[str] | None, option("NAME:MS", "ttft:500 tpot:40 e2el:9000.", panel=_RESULTS)
    ] = None,
    goodput_share: Annotated[
        float | None,
        option(
            "SHARE", "With --request-rate auto; default: 0.95.", panel=_RESULTS, parser=parse_share
        ),
    ] = None,
    probe_request_rate: Annotated[
        float,
        option("R", "Beside the load, requests of one token; told apart from it.", panel=_RESULTS),
    ] = 0.0,
    percentile_metrics: Annotated[
        str, option("NAMES", "Sections to print.", panel=_RESULTS)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, option("NUMBERS", "With commas.", panel=_RESULTS)] = "90,99",
    label: Annotated[Text, option("NAME", "This engine's name in reports.", panel=_RESULTS)] = None,
    output: Annotated[
        list[Path] | None,
        option("FILE", ".json, .csv or .html; may be repeated.", "-o", "--output", panel=_RESULTS),
    ] = None,
    save_result: Annotated[
        bool, switch("JSON and CSV in --result-dir.", "--save-result", panel=_RESULTS)
    ] = False,
    save_detailed: Annotated[
        bool, switch("Every request too.", "--save-detailed", panel=_RESULTS)
    ] = False,
    result_dir: Annotated[Path, option("DIR", "Where results go.", panel=_RESULTS)] = Path("."),
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
    from windlass.tools.common.summary import METRICS, parse_goodput
    from windlass.tools.common.text_workload import Sizes
    from windlass.tools.load.client import RequestOptions
    from windlass.tools.load.program import Load, ServeOrder

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
    options = RequestOptions(
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
        options,
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
            from windlass.tools.common.page import plotly_js

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
        from windlass.tools.common.report import show

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


def report(
    ctx: typer.Context,
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="JSONs of bench serve, or one of ladder."),
    ],
    output: Annotated[Path, option("FILE", "The page.", "-o", "--output")] = Path("report.html"),
    label: Annotated[
        list[str] | None, option("NAME", "For each file in turn; default: the file's own.")
    ] = None,
) -> None:
    """Put results of bench serve, of one engine or several, into one page that needs no network.

    The result of a ladder, such as one from a machine without plotly, becomes its page.
    """
    with reported(ctx):
        check_path("-o", output)
        from windlass.tools.common.record import read_record

        if len(results) == 1 and (record := read_record(results[0])).name == "ladder":
            from windlass.tools.ladder.report import save_report as save_ladder

            if label:
                raise ConfigError("--label means nothing for the result of a ladder.")
            save_ladder(record, output)
        else:
            from windlass.tools.load.report import read_records, save_report

            save_report(read_records(results, label or []), output)
        typer.echo(f"written to {output}", err=True)


def add_to(app: typer.Typer) -> None:
    """This command and that for its pages, to the bench app."""
    app.command(cls=ServeCommand)(serve)
    app.command(cls=PanelCommand)(report)
