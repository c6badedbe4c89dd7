"""`windlass bench serve`: benchmarks any OpenAI-compatible server.

Flags have the names of `vllm bench serve`. This file only parses them; tools/load runs the load.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.bench_loads import loads_of, numbers_of, search_share
from windlass.cli.command import PanelCommand, reported
from windlass.cli.flags import option, split_names, switch
from windlass.cli.options import parse_share
from windlass.cli.results import check_path
from windlass.cli.secrets import API_KEY_VARIABLE
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.load.run import ServeBenchConfig

_SUFFIXES = (".json", ".csv", ".html")
_MULTI_VALUE = ("--goodput", "--lora-modules")
_BACKENDS = {
    "openai-chat": "/v1/chat/completions",
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
}


class ServeCommand(PanelCommand):
    """Accepts several values per flag, such as `--goodput ttft:500 tpot:40`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        folded: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-"):
                flag = word if word in _MULTI_VALUE else ""
                folded.append(word)
            elif flag and folded[-1] != flag:
                folded += [flag, word]
            else:
                folded.append(word)
        return super().parse_args(ctx, folded)


Text = str | None
_KEY_VARIABLES = (API_KEY_VARIABLE, "OPENAI_API_KEY")
_SERVER, _LOAD, _ARRIVALS, _RESULTS = "Server", "Load", "Arrivals", "Results"


def serve(
    ctx: typer.Context,
    base_url: Annotated[
        Text,
        option(
            "URL",
            "Server URL; overrides --host and --port.",
            "--base-url",
            "--url",
            panel=_SERVER,
        ),
    ] = None,
    host: Annotated[str, option("ADDRESS", "Server address.", panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, option("N", "Server port.", panel=_SERVER)] = 8000,
    backend: Annotated[
        str, option("NAME", "openai-chat, openai, vllm.", panel=_SERVER)
    ] = "openai-chat",
    endpoint: Annotated[Text, option("PATH", "Default: the backend's.", panel=_SERVER)] = None,
    model: Annotated[Text, option("NAME", "Default: the server's first.", panel=_SERVER)] = None,
    api_key: Annotated[
        Text, option("KEY", "Default: $WINDLASS_API_KEY, or $OPENAI_API_KEY.", panel=_SERVER)
    ] = None,
    header: Annotated[
        list[str] | None,
        option("NAME=VALUE", "Additional HTTP header; may be repeated.", panel=_SERVER),
    ] = None,
    ready_check_timeout_sec: Annotated[
        float, option("S", "Seconds to wait for the server.", panel=_SERVER)
    ] = 10.0,
    request_timeout: Annotated[
        float, option("S", "Timeout of a request in seconds.", panel=_SERVER)
    ] = 600.0,
    max_retries: Annotated[
        int,
        option("N", "Retries after 429, after the Retry-After time; 0: fail.", panel=_SERVER),
    ] = 0,
    dataset_name: Annotated[
        str,
        option(
            "NAME",
            "chat, shared_prefix, rag, few_shot, long_document, code_edit, random; "
            "with --dataset-path: custom, timed_trace, sharegpt.",
            "--dataset-name",
            "--workload",
            panel=_LOAD,
        ),
    ] = "random",
    dataset_path: Annotated[
        Path | None, option("FILE", "File of custom, timed_trace or sharegpt.", panel=_LOAD)
    ] = None,
    skip_bad_lines: Annotated[
        bool, switch("Skip invalid lines.", "--skip-bad-lines", panel=_LOAD)
    ] = False,
    num_prompts: Annotated[int, option("N", "Requests per run.", panel=_LOAD)] = 64,
    input_len: Annotated[
        int | None,
        option(
            "N",
            "Prompt tokens; default: the dataset's.",
            "--input-len",
            "--random-input-len",
            panel=_LOAD,
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        option(
            "N",
            "Max output tokens; default: the dataset's.",
            "--output-len",
            "--random-output-len",
            panel=_LOAD,
        ),
    ] = None,
    prefix_len: Annotated[
        int | None,
        option("N", "Shared prefix tokens.", "--prefix-len", "--random-prefix-len", panel=_LOAD),
    ] = None,
    range_ratio: Annotated[
        float,
        option(
            "R",
            "Vary lengths by a ratio R below and above.",
            "--range-ratio",
            "--random-range-ratio",
            panel=_LOAD,
        ),
    ] = 0.0,
    turns: Annotated[
        int | None, option("N", "Turns per conversation of chat; default: 4.", panel=_LOAD)
    ] = None,
    tokens_per_word: Annotated[
        float | None, option("R", "Default: measured with the server's tokenizer.", panel=_LOAD)
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        option("NAME", "LoRA adapters; each request uses one at random.", panel=_LOAD),
    ] = None,
    temperature: Annotated[float | None, option("T", "Default: the server's.", panel=_LOAD)] = None,
    ignore_eos: Annotated[
        bool, switch("Do not stop at the end-of-text token.", "--ignore-eos", panel=_LOAD)
    ] = False,
    extra_body: Annotated[
        Text, option("JSON", "Additional fields of every request.", panel=_LOAD)
    ] = None,
    seed: Annotated[int, option("N", "Seed of texts and arrival times.", panel=_LOAD)] = 0,
    num_warmups: Annotated[int, option("N", "Warm-up requests, not counted.", panel=_LOAD)] = 0,
    request_rate: Annotated[
        str,
        option(
            "R",
            "Requests per second; a comma-separated list runs a sweep; inf sends all at once; auto "
            "finds the highest rate at which --goodput-share of the requests meet --goodput.",
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
        float, option("B", "1: Poisson; below 1: burstier; above 1: more even.", panel=_ARRIVALS)
    ] = 1.0,
    burst_size: Annotated[int, option("N", "Requests per burst.", panel=_ARRIVALS)] = 8,
    max_concurrency: Annotated[
        Text,
        option(
            "N", "Max requests in flight; a comma-separated list runs a sweep.", panel=_ARRIVALS
        ),
    ] = None,
    ramp_up_strategy: Annotated[
        Text, option("NAME", "linear, exponential.", panel=_ARRIVALS)
    ] = None,
    ramp_up_start_rps: Annotated[
        float | None, option("R", "Initial rate of a ramp.", panel=_ARRIVALS)
    ] = None,
    ramp_up_end_rps: Annotated[
        float | None, option("R", "Final rate of a ramp.", panel=_ARRIVALS)
    ] = None,
    trace_speed: Annotated[
        float, option("X", "Speed of a trace; 2 replays it in half the time.", panel=_ARRIVALS)
    ] = 1.0,
    goodput: Annotated[
        list[str] | None,
        option("NAME:MS", "Latency targets, e.g. ttft:500 tpot:40 e2el:9000.", panel=_RESULTS),
    ] = None,
    goodput_share: Annotated[
        float | None,
        option(
            "SHARE",
            "For --request-rate auto: required share of requests; default: 0.95.",
            panel=_RESULTS,
            parser=parse_share,
        ),
    ] = None,
    probe_request_rate: Annotated[
        float,
        option(
            "R",
            "Single-token requests per second beside the load, reported separately.",
            panel=_RESULTS,
        ),
    ] = 0.0,
    percentile_metrics: Annotated[
        str, option("NAMES", "Metrics to print, comma-separated.", panel=_RESULTS)
    ] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[
        str, option("NUMBERS", "Percentiles, comma-separated.", panel=_RESULTS)
    ] = "90,99",
    label: Annotated[Text, option("NAME", "Engine name in reports.", panel=_RESULTS)] = None,
    output: Annotated[
        list[Path] | None,
        option("FILE", ".json, .csv or .html; may be repeated.", "-o", "--output", panel=_RESULTS),
    ] = None,
    save_result: Annotated[
        bool, switch("Write JSON and CSV to --result-dir.", "--save-result", panel=_RESULTS)
    ] = False,
    save_detailed: Annotated[
        bool, switch("Save data of every request.", "--save-detailed", panel=_RESULTS)
    ] = False,
    result_dir: Annotated[Path, option("DIR", "Folder for --save-result.", panel=_RESULTS)] = Path(
        "."
    ),
) -> None:
    """Benchmark an OpenAI-compatible server and measure what its clients see."""
    given = dict(locals())
    with reported(ctx):
        files = _files(given)
        config = _config(given)
        from windlass.tools.load.run import measure

        result = measure(config, typer.echo)
        _write(result.record, files)
        code = 130 if result.stopped == "interrupted" else int(bool(result.stopped))
        if not result.stopped and not result.is_good:
            code = 1
    raise typer.Exit(code)


def _config(given: dict[str, Any]) -> ServeBenchConfig:
    from windlass.tools.common.summary import METRICS, parse_goodput
    from windlass.tools.load.client import RequestOptions
    from windlass.tools.load.run import ServeBenchConfig

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
            f"--endpoint {endpoint!r}: expected a path such as /v1/chat/completions or "
            "/v1/completions."
        )
    for name in ("request_timeout", "num_warmups", "max_retries", "probe_request_rate"):
        if given[name] < 0 or (name == "request_timeout" and given[name] == 0):
            raise ConfigError(f"--{name.replace('_', '-')} cannot be {given[name]:g}.")
    options = RequestOptions(
        model=given["model"] or "",
        endpoint=endpoint,
        temperature=given["temperature"],
        ignore_eos=given["ignore_eos"],
        extra=_json_object("--extra-body", given["extra_body"]),
        timeout_s=given["request_timeout"],
        max_retries=given["max_retries"],
    )
    return ServeBenchConfig(
        base_url=base_url,
        options=options,
        loads=loads_of(given),
        label=given["label"] or "",
        headers=_headers(given),
        num_warmups=given["num_warmups"],
        ready_timeout_s=given["ready_check_timeout_sec"],
        goodput=parse_goodput(given["goodput"] or []),
        percentiles=numbers_of("--metric-percentiles", given["metric_percentiles"], max_value=100),
        metrics=metrics,
        tokens_per_word=given["tokens_per_word"],
        adapters=tuple(split_names(",".join(given["lora_modules"] or []))),
        is_detailed=given["save_detailed"],
        search_share=search_share(given),
        probe_rate=given["probe_request_rate"],
    )


def _headers(given: dict[str, Any]) -> dict[str, str]:
    headers = {}
    keys = (given["api_key"], *(os.environ.get(name) for name in _KEY_VARIABLES))
    key = next(filter(None, keys), None)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    for item in given["header"] or []:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header {item!r}: expected NAME=VALUE.")
        headers[name] = value
    return headers


def _files(given: dict[str, Any]) -> list[Path]:
    """Output files; raises now if one cannot be written."""
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
        raise ConfigError("--result-dir has an effect only with --save-result; or use -o FILE.")
    for path in files:
        if path.suffix not in _SUFFIXES:
            raise ConfigError(f"-o {path}: expected a name that ends in {', '.join(_SUFFIXES)}.")
        check_path("-o", path)
        if path.suffix == ".html":
            from windlass.tools.common.page import plotly_js

            plotly_js()  # raises before anything is measured if plotly is not installed
    return files


def _write(record: Any, files: list[Path]) -> None:
    from windlass.tools.common.record import save_text
    from windlass.tools.load.report import page
    from windlass.tools.load.rows import save_csv

    for path in files:
        if path.suffix == ".json":
            record.save(path)
        elif path.suffix == ".csv":
            save_csv(record.rows, path)
        else:
            save_text(path, page([record]))
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
        raise ConfigError(f"{flag} {text!r}: is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text!r}: is not a JSON object.")
    return value


def report(
    ctx: typer.Context,
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="JSON files of bench serve, or one of ladder."),
    ],
    output: Annotated[Path, option("FILE", "HTML page.", "-o", "--output")] = Path("report.html"),
    label: Annotated[
        list[str] | None, option("NAME", "Engine name, once per file; default: the file's.")
    ] = None,
) -> None:
    """Render results of bench serve, of one or several engines, as one self-contained HTML page.

    Also renders a ladder's result, such as one from a machine without plotly.
    """
    with reported(ctx):
        check_path("-o", output)
        from windlass.tools.common.record import read_record, save_text

        if len(results) == 1 and (record := read_record(results[0])).name == "ladder":
            from windlass.tools.ladder.report import page as ladder_page

            if label:
                raise ConfigError("--label has no effect with the result of a ladder.")
            text = ladder_page(record)
        else:
            from windlass.tools.load.report import page, read_records

            text = page(read_records(results, label or []))
        save_text(output, text)
        typer.echo(f"written to {output}", err=True)


def add_to(app: typer.Typer) -> None:
    """Add `serve` and `report` to the bench app."""
    app.command(cls=ServeCommand)(serve)
    app.command(cls=PanelCommand)(report)
