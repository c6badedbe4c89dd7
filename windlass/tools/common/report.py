"""Tables of records: for the terminal, for Markdown, and for the pages of the docs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from windlass.errors import ConfigError
from windlass.tools.common.record import Record, read_record

Columns = dict[str, str]  # a row's key, or two with a slash -> the heading

_WIDEST = 1000
_TIMES: Columns = {
    "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
    "tpot_p50_ms/tpot_p99_ms": "TPOT p50 / p99 ms",
    "e2e_p50_ms/e2e_p99_ms": "e2e p50 / p99 ms",
}
_LIMITS: Columns = {
    "read_gb": "GB a step",
    "bandwidth_pct": "% of bandwidth",
    "memory_gib": "memory GiB",
}
_PERPLEXITY: Columns = {
    "label": "data",
    "tokens": "tokens",
    "perplexity": "perplexity",
    "perplexity_error": "±",
}
_TEXTS = (
    "draft",
    "settings",
    "how",
    "slo",
    "workload",
    "engine",
    "figure",
    "variant",
    "label",
    "task",
    "metric",
    "format",
    "type",
    "types",
    "checkpoint",
    "reader",
)
# The pages of the docs that have tables.
PAGES = (
    "docs/bench-serve.md",
    "docs/benchmarks.md",
    "docs/lora.md",
    "docs/ladder.md",
    "docs/planning.md",
    "docs/quantisation.md",
    "docs/speculation.md",
)
_PART = re.compile(r"(<!-- table:([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS: dict[str, Columns] = {
    "throughput": {
        "workload": "workload",
        "engine": "engine",
        "requests": "requests",
        "seconds": "seconds",
        "output_tok_s": "output tok/s",
        "total_tok_s": "total tok/s",
        "decode_tok_s": "decode tok/s",
        "decode_step_ms": "decode step ms",
        **_TIMES,
        **_LIMITS,
    },
    "latency": {
        "workload": "workload",
        "engine": "engine",
        "decode_tok_s": "decode tok/s",
        "decode_step_ms": "decode step ms",
        "ttft_p50_ms": "TTFT p50 ms",
        **_LIMITS,
    },
    "batching": {
        "variant": "batching",
        "output_tok_s": "output tok/s",
        "speedup": "against none",
        "steps": "steps",
        "ttft_p50_ms": "TTFT p50 ms",
        "e2e_p99_ms": "e2e p99 ms",
    },
    "prefix": {
        "variant": "prefix caching",
        "output_tok_s": "output tok/s",
        "speedup": "against off",
        "prompt_tokens_computed": "prompt tokens computed",
        "ttft_p50_ms": "TTFT p50 ms",
    },
    "speculation": {
        "spec": "guesses by",
        "workload": "workload",
        "off_tok_s/on_tok_s": "tok/s, off / on",
        "speedup/speedup_error": "times off / ±",
        "decode_off_tok_s/decode_on_tok_s": "decode tok/s, off / on",
        "decode_speedup": "times off",
        "control": "control",
        "drafted/accepted": "guesses / right",
        "acceptance_length": "tokens a row with guesses",
        "alike": "alike",
    },
    "draft_pairs": {
        "draft": "draft model",
        "speedup": "times off",
        "speedup_least/speedup_most": "least / most",
        "decode_speedup": "decode, times off",
        "drafted/accepted": "draft tokens / accepted",
        "acceptance_length": "tokens a verification",
    },
    "gguf_memory": {
        "engine": "engine",
        "peak_mib": "peak memory MiB",
        "decode_tok_s": "decode tok/s",
        "decode_ratio": "relative to the first row",
    },
    "adapters": {
        "workload": "workload",
        "adapters": "adapters",
        "figure": "tok/s of",
        "base_tok_s/adapters_tok_s": "base / with adapters",
        "ratio": "times the base",
        "adapter_mib": "MiB of an adapter",
        "together_gib/apart_gib": "GiB of 100 tenants, together / apart",
        "machines_together/machines_apart": "machines",
        "usd_hour_together/usd_hour_apart": "$ an hour of each",
    },
    "perplexity": _PERPLEXITY,
    "quality": {
        **_PERPLEXITY,
        "reference_perplexity": "reference",
        "ppl_ratio": "ratio",
        "ppl_ratio_error": "±",
        "kl_mean": "mean KL",
        "kl_p99": "p99 KL",
        "kl_max": "max KL",
        "agreement": "agreement",
        "rank_shift": "rank shift",
    },
    "formats": {
        "format": "format",
        "bits": "bits",
        "weight_bytes": "bytes in memory",
        "file_bytes": "on disk",
        "perplexity": "perplexity",
        "increase_pct": "against float32, %",
        "increase_error_pct": "±",
        "kl_mean/kl_p99": "KL mean / p99",
        "agreement": "agreement",
        "served_increase_pct": "as served, %",
        "served_agreement": "agreement",
        "tok_s_b1/tok_s_b8": "tok/s, 1 / 8 rows",
        "speedup_b1/speedup_b8": "times float32",
    },
    "gguf-perplexity": {
        "type": "type",
        "types": "matrices",
        "llama_cpp": "llama.cpp",
        "float32": "float32",
        "float32_pct": "against llama.cpp, %",
        "served": "served",
        "served_pct": "against llama.cpp, %",
    },
    "readers": {
        "checkpoint": "checkpoint",
        "reader": "read by",
        "tokens": "tokens",
        "rms": "rms",
        "max": "largest difference",
        "kl_mean": "mean KL",
        "agreement": "agreement",
        "served_kl_mean": "as served: mean KL",
        "served_agreement": "agreement",
    },
    "tasks": {
        "task": "task",
        "metric": "metric",
        "value": "value",
        "error": "±",
        "reference": "reference",
        "samples": "samples",
    },
    "serve": {
        "label": "engine",
        "workload": "load",
        "request_rate": "req/s asked",
        "max_concurrency": "at once",
        "completed/failed": "good / failed",
        "request_throughput": "req/s",
        "request_goodput": "goodput req/s",
        "output_throughput": "output tok/s",
        "total_token_throughput": "total tok/s",
        "median_ttft_ms/p99_ttft_ms": "TTFT p50 / p99 ms",
        "median_tpot_ms/p99_tpot_ms": "TPOT p50 / p99 ms",
        "median_e2el_ms/p99_e2el_ms": "e2e p50 / p99 ms",
        "cached_input_tokens": "prompt tokens cached",
    },
    "ladder": {
        "label": "rung",
        "low_tok_s/sat_tok_s": "tok/s",
        "low_times/sat_times": "times the base",
        "sat_req_s": "req/s",
        "article_req_s": "articles' req/s",
        "sat_e2e_p50_s": "p50 s",
        "article_p50_s": "articles' p50 s",
        "low_ttft_p50_ms/low_ttft_p99_ms": "TTFT ms, low",
        "sat_ttft_p50_ms/sat_ttft_p99_ms": "TTFT ms, full",
        "low_tpot_p50_ms/low_tpot_p99_ms": "TPOT ms, low",
        "sat_tpot_p50_ms/sat_tpot_p99_ms": "TPOT ms, full",
        "memory_mib": "memory MiB",
        "perplexity": "perplexity",
        "agreement": "agreement",
        "low_usd_per_million/sat_usd_per_million": "$ per million",
    },
    "tune": {
        "settings": "settings",
        "how": "how",
        "output_throughput": "output tok/s",
        "runs": "runs",
        "spread_pct": "apart, %",
        "median_ttft_ms/p99_ttft_ms": "TTFT p50 / p99 ms",
        "median_tpot_ms/p99_tpot_ms": "TPOT p50 / p99 ms",
        "median_e2el_ms/p99_e2el_ms": "e2e p50 / p99 ms",
        "quality": "quality",
        "usd_per_million": "$ per million",
        "kv_mib": "KV MiB",
        "slo": "SLO",
    },
    "plan-accuracy": {
        "workload": "load",
        "requests": "requests",
        "predicted_output_throughput/measured_output_throughput": "output tok/s, predicted / measured",
        "difference_pct": "difference, %",
        "predicted_median_ttft_ms/measured_median_ttft_ms": "TTFT p50 ms",
        "predicted_p99_ttft_ms/measured_p99_ttft_ms": "TTFT p99 ms",
        "predicted_median_tpot_ms/measured_median_tpot_ms": "TPOT p50 ms",
        "predicted_kv_peak_pct/measured_kv_peak_pct": "KV peak, %",
        "predicted_steps/measured_steps": "steps",
    },
    "outside": {
        "figure": "figure",
        "windlass": "windlass bench serve",
        "guidellm": "guidellm",
        "difference_pct": "difference, %",
    },
    "scheduler": {
        "running": "running requests",
        "plan_ms": "plan ms",
        "commit_ms": "commit ms",
        "step_ms": "both ms",
        "p99_ms": "p99 ms",
    },
}


def cell(value: Any) -> str:
    """1,234.5 for numbers, a dash where there is none."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def cells(name: str, row: Mapping[str, Any]) -> list[str]:
    """A row's texts in the order of the record's columns."""
    return [" / ".join(cell(row.get(key)) for key in keys.split("/")) for keys in COLUMNS[name]]


def markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table for a page."""
    lines = [list(COLUMNS[name].values()), ["---"] * len(COLUMNS[name])]
    lines += [cells(name, row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(record: Record) -> None:
    """The record as a table in the terminal, never cut off: a narrow one wraps the lines."""
    table = Table(box=None, pad_edge=False)
    for key, heading in COLUMNS[record.name].items():
        is_text = key in _TEXTS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in record.rows:
        table.add_row(*cells(record.name, row))
    Console(width=_WIDEST, soft_wrap=True, markup=False, highlight=False).print(table)


def fill(page: str, results: Path) -> str:
    """The page with its tables written from the stored results.

    `<!-- table:NAME -->` to `<!-- end -->` holds the rows of `results/NAME.json`.
    """
    if not _PART.search(page):
        raise ConfigError("the page has no <!-- table:NAME --> ... <!-- end --> to fill.")
    return _PART.sub(lambda found: found[1] + _table(results / f"{found[2]}.json") + found[3], page)


def _table(path: Path) -> str:
    if not path.is_file():
        return f"\nNot measured yet: there is no `{path.name}`.\n\n"
    record = read_record(path)
    if record.name not in COLUMNS:
        raise ConfigError(
            f"{path}: results of {record.name!r} have no table. Known: {', '.join(COLUMNS)}."
        )
    table = markdown(record.name, record.rows)
    return f"\n{table}\n\n{record.notes}\n\n`{record.command}` {record.origin}\n\n"
