"""`windlass run-batch`: runs a file of OpenAI's batch requests without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from windlass.cli.command import Options
from windlass.cli.flags import ShowProgress, log, option
from windlass.cli.options import SERVE_OPTIONS
from windlass.cli.results import check_path

_NAMES = {
    "chat_template",
    "default_chat_template_kwargs",
    "max_body_bytes",
    "max_logprobs",
    "reasoning_parser",
    "tool_call_parser",
    "trust_request_chat_template",
    "unknown_fields",
}
RUN_BATCH_OPTIONS = [each for each in SERVE_OPTIONS if each.name in _NAMES]


def run_batch(
    options: Options,
    input_file: Annotated[
        Path,
        option("FILE", "JSONL file of requests in OpenAI's batch format.", "-i", "--input-file"),
    ],
    output_file: Annotated[
        Path, option("FILE", "Write the responses to this JSONL file.", "-o", "--output-file")
    ],
    progress: ShowProgress = True,
) -> int:
    """Run a file of batch requests, without a server.

    A line of the file is {"custom_id": ID, "method": "POST", "url": "/v1/chat/completions", "body":
    {...}}. Results are saved as they come: the same command resumes an interrupted run.
    """
    check_path("-o", output_file)
    config, serve_config = options.engine(), options.serve()
    from windlass.tools.run_batch import RunBatch, run_batch

    counts = run_batch(RunBatch(input_file, output_file, progress), config, serve_config)
    log(f"{counts.completed} requests completed, {counts.failed} failed: {output_file}")
    return 0
