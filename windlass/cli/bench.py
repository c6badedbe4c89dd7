"""`windlass bench`: the numbers, as a table in the terminal and as JSON with all to repeat them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.bench_serve import add_to
from windlass.cli.command import Options, PanelCommand, register, reported
from windlass.cli.config_file import read_config
from windlass.cli.flags import (
    Context,
    JsonOutput,
    MaxWindows,
    Repeat,
    SampleTokens,
    Stride,
    log,
    option,
    split_names,
    switch,
)
from windlass.cli.options import ENGINE_OPTIONS, LORA_OPTIONS, MODEL_ARGUMENT
from windlass.cli.results import check_path, finish
from windlass.errors import ConfigError

_BATCHES = "1,8,64,256"
_HELD = [one for one in LORA_OPTIONS if one.name == "lora_dtype"]  # what levers adapters may vary

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure.")

InputLen = Annotated[int | None, option("N", "Prompt tokens of a request; default: its own.")]
OutputLen = Annotated[int | None, option("N", "Tokens that a request makes; default: its own.")]
Engines = Annotated[str, option("NAMES", "windlass, transformers, or both with a comma.")]


def throughput(
    options: Options,
    workload: Annotated[
        str,
        option(
            "NAMES",
            "decode, decode_bN, prefill, mixed, prefix, io, ioAxBxN, nano, ragged, shared; "
            "several with commas.",
        ),
    ] = "mixed",
    batch: Annotated[
        int | None, option("N", "Requests of decode; most rows at once of transformers.")
    ] = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_requests: Annotated[int | None, option("N", "How many requests; default: its own.")] = None,
    deterministic: Annotated[
        bool, switch("Each workload again with deterministic requests.", "--deterministic")
    ] = False,
    engine: Engines = "windlass",
    repeat: Repeat = 1,
    output: JsonOutput = None,
) -> int:
    """Measure tokens a second of fixed workloads.

    All requests of a workload are sent at once, with random token ids; they end after a fixed
    number of tokens. --load-format dummy needs no weights and no tokenizer: a folder with a
    config.json, such as those in benchmarks/models.
    """
    check_path("-o", output)
    from windlass.tools.bench.throughput import Order, measure
    from windlass.tools.common.workload import Sizes, find_all

    engines = split_names(engine)
    sizes = Sizes(batch, input_len, output_len, num_requests)
    elsewhere = ["batch"] if "transformers" in engines else []
    workloads = find_all(workload, sizes, elsewhere)
    if deterministic:
        if engines != ["windlass"]:
            raise ConfigError("--deterministic is for --engine windlass; others have no such mode.")
        fixed = [replace(w, name=f"{w.name}, deterministic", deterministic=True) for w in workloads]
        workloads = [*workloads, *fixed]
    order = Order(workloads, engines, repeat, batch)
    finish(measure(options.engine_values(), order, log), output)
    return 0


def latency(
    options: Options,
    batch: Annotated[str, option("NUMBERS", "Rows at once, with commas.")] = _BATCHES,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    engine: Engines = "windlass",
    repeat: Repeat = 1,
    output: JsonOutput = None,
) -> int:
    """Measure decode steps at several batch sizes.

    Prompts of 128 tokens, outputs of 256, all at once; the time until every request has its first
    token is not counted.
    """
    check_path("-o", output)
    from windlass.tools.bench.throughput import Order, measure
    from windlass.tools.common.workload import Sizes, find_all

    try:
        counts = [int(count) for count in split_names(batch)]
    except ValueError:
        raise ConfigError(f"--batch {batch!r}: expected numbers such as {_BATCHES}.") from None
    names = ",".join(f"decode_b{count}" for count in counts)
    sizes = Sizes(input_len=input_len, output_len=output_len)
    order = Order(find_all(names, sizes), split_names(engine), repeat)
    finish(measure(options.engine_values(), order, log, "latency"), output)
    return 0


def formats(
    options: Options,
    formats: Annotated[str | None, option("NAMES", "Some of the rows, with commas.")] = None,
    data: Annotated[str, option("FILE", "Text to measure on, as for eval.")] = "wikitext2",
    context: Context = 512,
    stride: Stride = None,
    max_windows: MaxWindows = None,
    calibration: Annotated[
        Path | None, option("FILE", "JSONL for gptq, awq and smoothquant; as for quantize.")
    ] = None,
    samples: Annotated[int, option("N", "Texts to choose of it.")] = 128,
    sample_tokens: SampleTokens = 256,
    gguf_dir: Annotated[
        Path | None, option("DIR", "The model as Q8_0.gguf, Q4_K.gguf, ..., for the GGUF rows.")
    ] = None,
    speed: Annotated[
        bool, switch("Measure it too; not worth it on a busy machine.", "--speed/--no-speed")
    ] = True,
    repeat: Repeat = 3,
    work: Annotated[
        Path | None, option("DIR", "Where checkpoints are made; default: the user's cache.")
    ] = None,
    output: Annotated[Path, option("FILE", "Write JSON here.", "-o", "--output")] = Path(
        "benchmarks/formats.json"
    ),
) -> int:
    """Measure what every weight format costs in quality, and gives in bytes and speed.

    The reference is the model in float32. Rows that the output file holds already are not
    measured again, so that a run which was interrupted goes on. Rows: float32, float16, bfloat16,
    stored; int8, w8a8, fp8, fp8-block, int4, w4a8 and nf4 while loading (int8+head and int4+head: the head
    too); smoothquant, rtn, gptq and awq as windlass quantize makes them; gguf-TYPE from --gguf-dir;
    kv-int8 and kv-fp8: the cache.
    """
    check_path("-o", output)
    from windlass.folders import cache_folder
    from windlass.tools.bench.format_list import Means
    from windlass.tools.bench.formats import FormatsOrder, measure
    from windlass.tools.eval.windows import Cut

    order = FormatsOrder(
        options.engine_values(),
        split_names(formats or ""),
        data,
        Cut("strided", context, stride, max_windows),
        Means(calibration, gguf_dir),
        samples,
        sample_tokens,
        repeat,
        speed,
        work or cache_folder("formats"),
        output,
    )
    finish(measure(order, log), output)
    return 0


register(app, throughput, ENGINE_OPTIONS)
register(app, latency, ENGINE_OPTIONS)
register(app, formats, ENGINE_OPTIONS)
add_to(app)


@app.command(cls=PanelCommand)
def levers(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[adapters] [batching] [prefix] [scheduler] [speculation]"),
    ] = None,
    model: Annotated[str, option("MODEL", "As for serve.", "--model")] = "default",
    num_requests: Annotated[
        int | None, option("N", "Requests of each run; default: 32; prefix: 16; adapters: 64.")
    ] = None,
    repeat: Repeat = 1,
    spec: Annotated[
        list[str] | None,
        option(
            "NAME[=MODEL]",
            "speculation: who guesses, as for serve; may be repeated; default: ngram.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        option("FILE", "speculation: JSONL of messages in the place of its free answers."),
    ] = None,
    adapters: Annotated[
        int | None, option("N", "adapters: how many are known; default: 200.")
    ] = None,
    output_dir: Annotated[Path, option("DIR", "Where the JSONs go.", "-o", "--output-dir")] = Path(
        "benchmarks"
    ),
    config: Annotated[Path | None, option("FILE", "YAML with the names of serve's flags.")] = None,
) -> None:
    """Measure what one lever gives: on against off, on the same weights; all without a name."""
    with reported(ctx):
        from windlass.tools.bench import levers as programs
        from windlass.tools.common.workload import Sizes

        wanted = names or list(programs.LEVERS)
        unknown = [name for name in wanted if name not in programs.LEVERS]
        if unknown:
            known = ", ".join(programs.LEVERS)
            raise ConfigError(f"lever {unknown[0]!r} is not known. Known: {known}.")
        Sizes(num_requests=num_requests)  # a bad number is refused before anything is loaded
        if repeat < 1:
            raise ConfigError(f"--repeat must be at least 1, got {repeat}.")
        if (spec or prompts) and "speculation" not in wanted:
            raise ConfigError("--spec and --prompts are of the lever speculation; name it too.")
        if adapters is not None and ("adapters" not in wanted or adapters < 1):
            raise ConfigError(f"--adapters {adapters} is of the lever adapters, and at least 1.")
        free = _conversations(prompts)
        options: dict[str, Any] = {"model": model}
        if config is not None:
            options |= read_config(config, [MODEL_ARGUMENT, *ENGINE_OPTIONS, *_HELD])
        for name in wanted:
            if name == "scheduler":
                record = programs.scheduler(log)
            elif name == "adapters":
                record = programs.adapters(options, num_requests, repeat, log, adapters)
            elif name == "speculation":
                given = (options, num_requests, repeat, log)
                record = programs.speculation(*given, spec or ("ngram",), free)
            else:
                record = programs.WITH_MODEL[name](options, num_requests, repeat, log)
            finish(record, output_dir / f"{name}.json")


@app.command(cls=PanelCommand)
def tables(
    ctx: typer.Context,
    page: Annotated[
        list[Path] | None,
        option(
            "FILE", "A page to fill, may be repeated; default: those of docs/ that have tables."
        ),
    ] = None,
    results: Annotated[Path, option("DIR", "Where the JSONs are.")] = Path("benchmarks"),
    check: Annotated[
        bool, switch("Change nothing; exit with 1 when tables are stale.", "--check")
    ] = False,
) -> None:
    """Write the tables of the pages in docs/ from the results in benchmarks/."""
    with reported(ctx):
        from windlass.tools.common.report import PAGES, fill

        stale = []
        for each in page or map(Path, PAGES):
            try:
                before = each.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"--page {each}: {error.strerror or error}.") from error
            after = fill(before, results)
            if before != after:
                stale.append(each)
                if not check:
                    each.write_text(after, encoding="utf-8")
        if check and stale:
            for each in stale:
                typer.echo(f"{each}: tables are stale. Run windlass bench tables.", err=True)
            raise typer.Exit(1)


def _conversations(prompts: str | None) -> list[list[dict[str, Any]]] | None:
    if prompts is None:
        return None
    from windlass.cli.prompts import jobs_from_file

    found = jobs_from_file(prompts)
    return [job.messages or [{"role": "user", "content": job.prompt}] for job in found]
