"""`windlass generate`: completes prompts from flags or from a JSONL file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.command import Options
from windlass.cli.flags import Adapter, ShowProgress, option
from windlass.cli.prompts import Job, jobs_from_file
from windlass.cli.sampling import SAMPLING_OPTIONS, sampling_params
from windlass.cli.starting import starting
from windlass.errors import ConfigError, file_errors

if TYPE_CHECKING:
    from windlass.llm import LLM
    from windlass.outputs import RequestOutput

_MAX_TOKENS = {"max_tokens": 256}


def generate(
    options: Options,
    prompt: Annotated[
        list[str] | None, option("TEXT", "A prompt; repeatable.", "--prompt", "-p")
    ] = None,
    prompts: Annotated[
        str | None, option("FILE", "JSONL file of prompts or messages; -: stdin.")
    ] = None,
    output: Annotated[
        str | None, option("FILE", "Write JSONL to this file; -: stdout.", "--output", "-o")
    ] = None,
    adapter: Adapter = "",
    progress: ShowProgress = True,
) -> int:
    """Complete prompts.

    Completions of -p are printed as text unless -o is given; those of a file are printed as JSONL. A
    line of the file is {"prompt": TEXT} or {"messages": [...]}, with an optional "id" and optional
    sampling fields.
    """
    requested = options.only(SAMPLING_OPTIONS)
    sampling_params(_MAX_TOKENS, requested)  # rejects a bad value before the model is loaded
    jobs = _jobs(prompt or [], prompts, options)
    _check_writable(output)
    with starting(options.model, shown=progress):
        from windlass.llm import LLM

        llm = LLM(**options.engine_values())
    start = time.perf_counter()
    results = _complete(llm, jobs, requested=requested, progress=progress, adapter=adapter)
    seconds = time.perf_counter() - start
    as_text = output is None and prompts is None
    _write(output, _lines(jobs, results, as_text))
    typer.echo(_summary(results, seconds), err=True)
    return 0


def _jobs(texts: list[str], file: str | None, options: Options) -> list[Job]:
    if bool(texts) == bool(file):
        taken = ""
        if not texts and " " in options.model and not Path(options.model).exists():
            taken = f" {options.model!r} was taken for the model; a prompt follows -p."
        raise ConfigError(
            "give prompts with -p TEXT or with --prompts FILE.jsonl"
            + (", not both." if texts else f"; neither is given.{taken}")
        )
    if file is not None:
        return jobs_from_file(file)
    return [Job(id=str(i), prompt=text) for i, text in enumerate(texts)]


def _complete(
    llm: LLM, jobs: list[Job], *, requested: dict[str, Any], progress: bool, adapter: str
) -> list[RequestOutput]:
    """Results in the order of the jobs. Conversations and prompts are two calls of the engine."""
    results: dict[int, RequestOutput] = {}
    for is_chat, call in ((False, llm.generate), (True, llm.chat)):
        numbers = [i for i, job in enumerate(jobs) if (job.messages is not None) == is_chat]
        if not numbers:
            continue
        inputs: list[Any] = [jobs[i].messages if is_chat else jobs[i].prompt for i in numbers]
        layers = (_MAX_TOKENS, llm.card.default_sampling, requested)
        sampling = [sampling_params(*layers, jobs[i].sampling) for i in numbers]
        results |= dict(zip(numbers, call(inputs, sampling, progress, adapter), strict=True))
    return [results[i] for i in range(len(jobs))]


def _lines(jobs: list[Job], results: list[RequestOutput], as_text: bool) -> Iterator[str]:
    for job, result in zip(jobs, results, strict=True):
        for record in _records(job, result):
            yield record["text"] if as_text else json.dumps(record, ensure_ascii=False)


def _records(job: Job, result: RequestOutput) -> Iterator[dict[str, Any]]:
    """One record per completion, with an `index` if a request has several."""
    for completion in result.outputs:
        record: dict[str, Any] = {"id": job.id}
        record |= {"prompt": job.prompt} if job.messages is None else {"messages": job.messages}
        if len(result.outputs) > 1:
            record["index"] = completion.index
        record |= {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": len(result.prompt_token_ids),
                "completion_tokens": len(completion.token_ids),
                "cached_tokens": result.num_cached,
            },
        }
        for name, scores in (
            ("logprobs", completion.logprobs),
            ("prompt_logprobs", result.prompt_logprobs),
        ):
            if scores is not None:
                record[name] = [score._asdict() for score in scores]
        yield record


def _summary(results: list[RequestOutput], seconds: float) -> str:
    num_prompt = sum(len(result.prompt_token_ids) for result in results)
    num_output = sum(len(out.token_ids) for result in results for out in result.outputs)
    return (
        f"requests: {len(results)}, prompt tokens: {num_prompt}, generated tokens: {num_output}, "
        f"{seconds:.2f} s, {num_output / seconds:.1f} tok/s"
    )


def _check_writable(output: str | None) -> None:
    """Reject a bad path before the model is loaded. Does not change the file."""
    if output is None or output == "-":
        return
    with file_errors(f"-o {output}"):
        Path(output).open("a").close()


def _write(output: str | None, lines: Iterator[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if output is None or output == "-":
        typer.echo(text, nl=False)
    else:
        Path(output).write_text(text, encoding="utf-8")
