"""Writes the tables of the docs from the records in benchmarks/.

    python benchmarks/scripts/docs_tables.py [--page FILE ...] [--results DIR] [--check]

In a page, the text between `<!-- table:NAME -->` and `<!-- end -->` becomes the table of `DIR/NAME.json`.
--check changes nothing, and exits with 1 if a table is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from windlass.errors import ConfigError, file_errors
from windlass.tools.common import report
from windlass.tools.common.record import read_record
from windlass.tools.common.report import Columns, markdown

_TABLE = re.compile(r"(<!-- table:([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = (
    "docs/bench-serve.md",
    "docs/benchmarks.md",
    "docs/cpu.md",
    "docs/disaggregation.md",
    "docs/fairness.md",
    "docs/fleet.md",
    "docs/kv-tiers.md",
    "docs/lora.md",
    "docs/ladder.md",
    "docs/parallel.md",
    "docs/planning.md",
    "docs/quantisation.md",
    "docs/serving.md",
    "docs/slo.md",
    "docs/speculation.md",
)
# Of the records that scripts in this folder make, and of records made by hand.
COLUMNS: dict[str, Columns] = {
    **report.COLUMNS,
    "profile": {"step": "step", "work": "work", "ms": "ms", "percent": "%"},
    "slo-control": {
        "controller": "targets",
        "requests": "requests",
        "number": "number",
        "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
        "tpot_p50_ms/tpot_p99_ms": "TPOT p50 / p99 ms",
        "itl_p50_ms/itl_p99_ms": "ITL p50 / p99 ms",
        "good": "within both targets",
        "goodput": "of these per second",
        "tok_s": "output tok/s",
    },
    "fair-share": {
        "label": "run",
        "requests": "requests",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p99_ms": "TTFT p99 ms",
        "p99_ratio": "p99 over alone",
        "jain": "Jain's index",
        "flood_left": "requests of the flood left",
    },
    "fleet-routing": {
        "routing": "routing",
        "requests": "requests",
        "hit_rate": "cached share of prompt tokens",
        "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
        "output_tok_s": "output tok/s",
    },
    "fleet-router": {
        "replicas": "replicas",
        "hit_rate_prefix": "cached share, prefix",
        "hit_rate_round_robin": "cached share, round robin",
        "choice_ms": "time of a choice ms",
    },
    "fleet-scaling": {
        "replicas": "replicas",
        "output_tok_s": "output tok/s",
        "ratio": "ratio",
    },
    "fleet-cost": {
        "part": "part",
        "request_ms": "CPU ms per request",
        "token_ms": "CPU ms per frame",
        "idle_cpu_pct": "% of a core when idle",
    },
    "fleet-failures": {
        "killed": "killed",
        "kills": "kills",
        "ok": "requests answered",
        "cut": "streams cut",
        "lost": "requests lost",
        "recovery_p50_s": "all replicas up again: p50 s",
        "recovery_max_s": "max s",
    },
    "prefill-decode": {
        "label": "engines",
        "tokens": "tokens of streams",
        "itl_p50_ms/itl_p99_ms": "ITL p50 / p99 ms",
        "itl_max_ms": "ITL max ms",
        "prompts": "long prompts",
        "ttft_p50_ms/ttft_p99_ms": "their TTFT p50 / p99 ms",
        "handed_over": "handed over",
    },
    "kv tiers": {
        "tier": "tier",
        "phase": "turns",
        "requests_s": "requests/s",
        "tok_s": "tok/s",
        "ratio": "ratio",
        "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
        "prompt_tokens": "prompt tokens",
        "cached_tokens": "cached",
        "host_hit_tokens": "from host",
        "disk_hit_tokens": "from disk",
    },
    "http-rate": {
        "model": "model",
        "clients": "clients",
        "http_workers": "--http-workers",
        "tok_s": "output tok/s",
        "of_offline": "of offline",
        "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
        "itl_p50_ms/itl_p99_ms": "ITL p50 / p99 ms",
    },
    "sampling_steps": {
        "kind": "sampling",
        "tok_s": "output tok/s",
        "step_ms": "step ms",
        "before_tok_s": "before tok/s",
        "before_step_ms": "before step ms",
        "speedup": "speedup",
    },
    "cpu_time": {
        "case": "case",
        "windlass_ms": "windlass ms",
        "llama_cpp_ms": "llama.cpp ms",
        "ratio": "times llama.cpp's speed",
    },
    "thread_scaling": {
        "workload": "workload",
        "threads": "threads",
        "kind": "measured or modelled",
        "tok_s": "tok/s",
        "speedup": "speedup",
        "limit": "limit",
    },
    "draft_pairs": {
        "draft": "draft model",
        "speedup": "speedup",
        "speedup_min/speedup_max": "min / max",
        "decode_speedup": "decode speedup",
        "drafted/accepted": "draft tokens / accepted",
        "acceptance_length": "tokens per verification",
    },
    "gguf_memory": {
        "engine": "engine",
        "peak_mib": "peak memory MiB",
        "decode_tok_s": "decode tok/s",
        "decode_ratio": "relative to the first row",
    },
    "plan_broadcast": {
        "path": "path",
        "rows": "rows",
        "bytes": "bytes",
        "rank_0_us": "rank 0, µs",
        "relay_us": "other machine's relay, µs",
        "rank_us": "other rank, µs",
    },
    "embeddings": {
        "prompts": "prompts",
        "tokens_each": "tokens of each",
        "result": "result",
        "prompts_s": "prompts/s",
        "tok_s": "tok/s",
        "ratio": "ratio",
    },
    "tensor_parallel": {
        "model": "model",
        "workload": "workload",
        "one_tok_s": "1 process, 2 threads, tok/s",
        "two_tok_s": "2 ranks, 1 thread each, tok/s",
        "ratio": "ratio",
    },
    "vllm_comparison": {
        "model": "model",
        "workload": "workload",
        "vllm": "vLLM 0.26",
        "windlass": "Windlass",
        "ratio": "ratio",
        "record": "record",
    },
    "sequence_parallel": {
        "model": "model",
        "collectives": "collectives",
        "prompt": "prompt tokens",
        "whole_tok_s/split_tok_s": "tok/s, whole / split",
        "ratio": "ratio",
        "whole_count/split_count": "collectives, whole / split",
        "whole_mib/split_mib": "received, MiB, whole / split",
    },
    "gguf-perplexity": {
        "type": "type",
        "types": "matrices",
        "llama_cpp": "llama.cpp",
        "float32": "float32",
        "float32_pct": "difference, %",
        "served": "served",
        "served_pct": "difference, %",
    },
    "readers": {
        "checkpoint": "checkpoint",
        "reader": "reader",
        "tokens": "tokens",
        "rms": "RMS difference",
        "max": "max difference",
        "kl_mean": "mean KL",
        "agreement": "agreement",
        "served_kl_mean": "served: mean KL",
        "served_agreement": "served: agreement",
    },
    "outside": {
        "figure": "figure",
        "windlass": "windlass bench serve",
        "guidellm": "guidellm",
        "difference_pct": "difference, %",
    },
}


def fill(page: str, results: Path) -> str:
    """Return the page with its tables filled from the stored results."""
    if not _TABLE.search(page):
        raise ConfigError("the page has no <!-- table:NAME --> ... <!-- end --> to fill.")
    return _TABLE.sub(
        lambda found: found[1] + _table(results / f"{found[2]}.json") + found[3], page
    )


def _table(path: Path) -> str:
    if not path.is_file():
        return f"\nNot measured yet: there is no `{path.name}`.\n\n"
    record = read_record(path)
    if record.name not in COLUMNS:
        raise ConfigError(
            f"{path}: results of {record.name!r} have no table. Known: {', '.join(COLUMNS)}."
        )
    table = markdown(COLUMNS[record.name], record.rows)
    return f"\n{table}\n\n{record.notes}\n\n`{record.command}` {record.origin}\n\n"


def update(pages: list[Path], results: Path, *, check: bool) -> list[Path]:
    """Write the stale pages, or with `check` only find them."""
    stale = []
    for page in pages:
        with file_errors(f"--page {page}"):
            before = page.read_text(encoding="utf-8")
        after = fill(before, results)
        if before != after:
            stale.append(page)
            if not check:
                page.write_text(after, encoding="utf-8")
    return stale


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, action="append", help="default: all pages of docs/")
    parser.add_argument("--results", type=Path, default=Path("benchmarks"))
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    pages = args.page or [Path(page) for page in PAGES]
    try:
        stale = update(pages, args.results, check=args.check)
    except ConfigError as error:
        parser.error(str(error))
    for page in stale if args.check else ():
        print(f"{page}: tables are stale. Run {Path(__file__).name}.", file=sys.stderr)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
