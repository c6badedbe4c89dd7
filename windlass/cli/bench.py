"""`windlass bench`: benchmarks, with a table in the terminal and reproducible JSON records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.bench_serve import add_to
from windlass.cli.command import CommandGroup, Options, PanelCommand, register, reported
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
_ADAPTER_OPTIONS = [item for item in LORA_OPTIONS if item.name == "lora_dtype"]

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="Run benchmarks."
)

InputLen = Annotated[int | None, option("N", "Prompt tokens per request; default: the workload's.")]
OutputLen = Annotated[
    int | None, option("N", "Output tokens per request; default: the workload's.")
]
Engines = Annotated[str, option("NAMES", "windlass, transformers, or both, comma-separated.")]


def throughput(
    options: Options,
    workload: Annotated[
        str,
        option(
            "NAMES",
            "Comma-separated: decode, decode_bN, prefill, mixed, prefix, io, ioAxBxN, nano, "
            "ragged, shared.",
        ),
    ] = "mixed",
    batch: Annotated[
        int | None, option("N", "Requests of decode; max batch size of transformers.")
    ] = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_requests: Annotated[
        int | None, option("N", "Number of requests; default: the workload's.")
    ] = None,
    deterministic: Annotated[
        bool,
        switch("Run each workload again with deterministic requests.", "--deterministic"),
    ] = False,
    engine: Engines = "windlass",
    repeat: Repeat = 1,
    output: JsonOutput = None,
) -> int:
    """Measure the throughput of fixed workloads.

    All requests of a workload are sent at once, with random token ids and a fixed number of output
    tokens. --load-format dummy needs no weights and no tokenizer, only a folder with a config.json,
    such as those in benchmarks/models.
    """
    check_path("-o", output)
    from windlass.tools.bench.throughput import ThroughputConfig, measure
    from windlass.tools.common.workload import Sizes, find_all

    engines = split_names(engine)
    sizes = Sizes(
        batch=batch, input_len=input_len, output_len=output_len, num_requests=num_requests
    )
    workloads = find_all(workload, sizes, ["batch"] if "transformers" in engines else [])
    if deterministic:
        if engines != ["windlass"]:
            raise ConfigError("--deterministic works only with --engine windlass.")
        workloads += [
            replace(w, name=f"{w.name}, deterministic", deterministic=True) for w in workloads
        ]
    bench = ThroughputConfig(workloads=workloads, engines=engines, repeat=repeat, batch=batch)
    finish(measure(options.engine_values(), bench, log), output)
    return 0


def latency(
    options: Options,
    batch: Annotated[str, option("NUMBERS", "Batch sizes, comma-separated.")] = _BATCHES,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    engine: Engines = "windlass",
    repeat: Repeat = 1,
    output: JsonOutput = None,
) -> int:
    """Measure decode steps at several batch sizes.

    Prompts of 128 tokens, outputs of 256, all requests sent at once. The time until every request
    has its first token is not counted.
    """
    check_path("-o", output)
    from windlass.tools.bench.throughput import ThroughputConfig, measure
    from windlass.tools.common.workload import Sizes, find_all

    try:
        counts = [int(count) for count in split_names(batch)]
    except ValueError:
        raise ConfigError(f"--batch {batch!r}: expected numbers such as {_BATCHES}.") from None
    names = ",".join(f"decode_b{count}" for count in counts)
    sizes = Sizes(input_len=input_len, output_len=output_len)
    bench = ThroughputConfig(find_all(names, sizes), split_names(engine), repeat)
    finish(measure(options.engine_values(), bench, log, name="latency"), output)
    return 0


def formats(
    options: Options,
    formats: Annotated[
        str | None, option("NAMES", "Formats, comma-separated; default: all.")
    ] = None,
    data: Annotated[str, option("FILE", "Evaluation text, as for eval.")] = "wikitext2",
    context: Context = 512,
    stride: Stride = None,
    max_windows: MaxWindows = None,
    calibration: Annotated[
        Path | None,
        option("FILE", "Calibration JSONL for gptq, awq and smoothquant, as for quantize."),
    ] = None,
    samples: Annotated[int, option("N", "Number of calibration texts.")] = 128,
    sample_tokens: SampleTokens = 256,
    gguf_dir: Annotated[
        Path | None, option("DIR", "The model as Q8_0.gguf, Q4_K.gguf, ..., for GGUF formats.")
    ] = None,
    speed: Annotated[
        bool,
        switch("Measure speed too; unreliable on a busy machine.", "--speed/--no-speed"),
    ] = True,
    repeat: Repeat = 3,
    work: Annotated[
        Path | None, option("DIR", "Folder for checkpoints; default: the user's cache.")
    ] = None,
    output: Annotated[Path, option("FILE", "Write JSON here.", "-o", "--output")] = Path(
        "benchmarks/formats.json"
    ),
) -> int:
    """Measure the quality, size and speed of every weight format.

    The reference is the model in float32. An interrupted run resumes: rows that the output file
    already has are not measured again. Formats: float32, float16, bfloat16, stored; int8, w8a8, fp8,
    fp8-block, int4, w4a8 and nf4, quantised while loading (int8+head and int4+head include the head);
    smoothquant, rtn, gptq and awq checkpoints of windlass quantize; gguf-TYPE from --gguf-dir;
    kv-int8 and kv-fp8 for the KV cache.
    """
    check_path("-o", output)
    from windlass.folders import cache_folder
    from windlass.tools.bench.checkpoints import FormatInputs
    from windlass.tools.bench.formats import FormatsConfig, measure
    from windlass.tools.eval.windows import Cut

    config = FormatsConfig(
        options=options.engine_values(),
        names=split_names(formats or ""),
        data=data,
        cut=Cut(method="strided", context=context, stride=stride, max_windows=max_windows),
        inputs=FormatInputs(calibration, gguf_dir),
        num_samples=samples,
        sample_tokens=sample_tokens,
        repeat=repeat,
        speed=speed,
        work=work or cache_folder("formats"),
        output=output,
    )
    finish(measure(config, log), output)
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
        int | None, option("N", "Requests per run; default: 32; prefix: 16; adapters: 64.")
    ] = None,
    repeat: Repeat = 1,
    spec: Annotated[
        list[str] | None,
        option(
            "NAME[=MODEL]",
            "speculation: proposer, as for serve; may be repeated; default: ngram.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        option("FILE", "speculation: JSONL of messages that replace its free-form prompts."),
    ] = None,
    adapters: Annotated[
        int | None, option("N", "adapters: number of registered adapters; default: 200.")
    ] = None,
    output_dir: Annotated[
        Path, option("DIR", "Folder for the JSON files.", "-o", "--output-dir")
    ] = Path("benchmarks"),
    config: Annotated[Path | None, option("FILE", "YAML with the names of serve's flags.")] = None,
) -> None:
    """Measure single optimisations on against off, with the same weights; default: all."""
    with reported(ctx):
        from windlass.tools.bench import levers as programs
        from windlass.tools.common.workload import Sizes

        chosen = names or list(programs.LEVERS)
        unknown = [name for name in chosen if name not in programs.LEVERS]
        if unknown:
            known = ", ".join(programs.LEVERS)
            raise ConfigError(f"lever {unknown[0]!r} is not known. Known: {known}.")
        Sizes(num_requests=num_requests)  # rejects a bad number before anything is loaded
        if repeat < 1:
            raise ConfigError(f"--repeat must be at least 1, got {repeat}.")
        if (spec or prompts) and "speculation" not in chosen:
            raise ConfigError("--spec and --prompts need the lever speculation.")
        if adapters is not None and ("adapters" not in chosen or adapters < 1):
            raise ConfigError(f"--adapters {adapters} needs the lever adapters and at least 1.")
        free = _conversations(prompts)
        options: dict[str, Any] = {"model": model}
        if config is not None:
            options |= read_config(config, [MODEL_ARGUMENT, *ENGINE_OPTIONS, *_ADAPTER_OPTIONS])
        for name in chosen:
            if name == "scheduler":
                record = programs.scheduler(log)
            elif name == "adapters":
                record = programs.adapters(options, num_requests, repeat, log, adapters)
            elif name == "speculation":
                record = programs.speculation(
                    options, num_requests, repeat, log, spec or ("ngram",), free
                )
            else:
                record = programs.WITH_MODEL[name](options, num_requests, repeat, log)
            finish(record, output_dir / f"{name}.json")


def _conversations(prompts: str | None) -> list[list[dict[str, Any]]] | None:
    if prompts is None:
        return None
    from windlass.cli.prompts import jobs_from_file

    found = jobs_from_file(prompts)
    return [job.messages or [{"role": "user", "content": job.prompt}] for job in found]
