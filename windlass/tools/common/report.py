"""Renders records as tables: in the terminal, as Markdown, and in the pages of the docs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from windlass.errors import ConfigError
from windlass.tools.common.record import Record, read_record

Columns = dict[str, str]  # key of a row, or two keys with a slash -> heading

_MAX_WIDTH = 1000
_TIMES: Columns = {
    "ttft_p50_ms/ttft_p99_ms": "TTFT p50 / p99 ms",
    "tpot_p50_ms/tpot_p99_ms": "TPOT p50 / p99 ms",
    "e2e_p50_ms/e2e_p99_ms": "e2e p50 / p99 ms",
}
_LIMITS: Columns = {
    "read_gb": "GB per step",
    "bandwidth_pct": "% of bandwidth",
    "int8_pct": "% of int8 peak",
    "memory_gib": "memory GiB",
}
_OPTIONAL_COLUMNS = ("int8_pct",)
_PERPLEXITY: Columns = {
    "label": "data",
    "tokens": "tokens",
    "perplexity": "perplexity",
    "perplexity_error": "±",
}
_TEXT_COLUMNS = (
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
    "step",
    "work",
)
# Pages of the docs with tables.
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
_TABLE = re.compile(r"(<!-- table:([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS: dict[str, Columns] = {
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
        "speedup": "speedup over none",
        "steps": "steps",
        "ttft_p50_ms": "TTFT p50 ms",
        "e2e_p99_ms": "e2e p99 ms",
    },
    "prefix": {
        "variant": "prefix caching",
        "output_tok_s": "output tok/s",
        "speedup": "speedup over off",
        "prompt_tokens_computed": "prompt tokens computed",
        "ttft_p50_ms": "TTFT p50 ms",
    },
    "speculation": {
        "spec": "proposer",
        "workload": "workload",
        "off_tok_s/on_tok_s": "tok/s, off / on",
        "speedup/speedup_error": "speedup / ±",
        "decode_off_tok_s/decode_on_tok_s": "decode tok/s, off / on",
        "decode_speedup": "decode speedup",
        "control": "control",
        "drafted/accepted": "draft tokens / accepted",
        "acceptance_length": "tokens per verification",
        "alike": "identical tokens",
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
    "adapters": {
        "workload": "workload",
        "adapters": "adapters",
        "figure": "phase",
        "base_tok_s/adapters_tok_s": "tok/s, base / adapters",
        "ratio": "ratio",
        "adapter_mib": "MiB per adapter",
        "together_gib/apart_gib": "GiB for 100 tenants, shared / separate",
        "machines_together/machines_apart": "machines, shared / separate",
        "usd_hour_together/usd_hour_apart": "$ per tenant and hour, shared / separate",
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
        "file_bytes": "bytes on disk",
        "perplexity": "perplexity",
        "increase_pct": "increase over float32, %",
        "increase_error_pct": "±",
        "kl_mean/kl_p99": "KL mean / p99",
        "agreement": "agreement",
        "served_increase_pct": "served: increase, %",
        "served_agreement": "served: agreement",
        "tok_s_b1/tok_s_b8": "tok/s, 1 / 8 rows",
        "speedup_b1/speedup_b8": "speedup over float32",
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
        "workload": "workload",
        "request_rate": "request rate",
        "max_concurrency": "max concurrency",
        "completed/failed": "completed / failed",
        "request_throughput": "req/s",
        "request_goodput": "goodput req/s",
        "output_throughput": "output tok/s",
        "total_token_throughput": "total tok/s",
        "median_ttft_ms/p99_ttft_ms": "TTFT p50 / p99 ms",
        "median_tpot_ms/p99_tpot_ms": "TPOT p50 / p99 ms",
        "median_e2el_ms/p99_e2el_ms": "e2e p50 / p99 ms",
        "cached_input_tokens": "cached prompt tokens",
    },
    "ladder": {
        "label": "rung",
        "low_tok_s/sat_tok_s": "tok/s",
        "low_speedup/sat_speedup": "speedup over base",
        "sat_req_s": "req/s",
        "article_req_s": "articles' req/s",
        "sat_e2e_p50_s": "e2e p50 s",
        "article_p50_s": "articles' e2e p50 s",
        "low_ttft_p50_ms/low_ttft_p99_ms": "TTFT ms, low",
        "sat_ttft_p50_ms/sat_ttft_p99_ms": "TTFT ms, saturation",
        "low_tpot_p50_ms/low_tpot_p99_ms": "TPOT ms, low",
        "sat_tpot_p50_ms/sat_tpot_p99_ms": "TPOT ms, saturation",
        "memory_mib": "memory MiB",
        "perplexity": "perplexity",
        "agreement": "agreement",
        "low_usd_per_million/sat_usd_per_million": "$ per million tokens",
    },
    "tune": {
        "settings": "settings",
        "how": "source",
        "output_throughput": "output tok/s",
        "runs": "runs",
        "spread_pct": "spread, %",
        "median_ttft_ms/p99_ttft_ms": "TTFT p50 / p99 ms",
        "median_tpot_ms/p99_tpot_ms": "TPOT p50 / p99 ms",
        "median_e2el_ms/p99_e2el_ms": "e2e p50 / p99 ms",
        "quality": "quality",
        "usd_per_million": "$ per million tokens",
        "kv_mib": "KV MiB",
        "slo": "SLO",
    },
    "plan-accuracy": {
        "workload": "workload",
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
        "step_ms": "total ms",
        "p99_ms": "p99 ms",
    },
}


def cell(value: Any) -> str:
    """Format a value: numbers with thousands separators, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def columns(name: str, rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The columns of a record, without optional ones that no row has."""
    return {
        keys: heading
        for keys, heading in COLUMNS[name].items()
        if keys not in _OPTIONAL_COLUMNS or any(keys in row for row in rows)
    }


def cells(shown: Columns, row: Mapping[str, Any]) -> list[str]:
    """The formatted cells of a row, in the order of the columns."""
    return [" / ".join(cell(row.get(key)) for key in keys.split("/")) for keys in shown]


def markdown(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    shown = columns(name, rows)
    lines = [list(shown.values()), ["---"] * len(shown), *(cells(shown, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(record: Record) -> None:
    """Print the record as a table. Long lines wrap in a narrow terminal and are never truncated."""
    table = Table(box=None, pad_edge=False)
    shown = columns(record.name, record.rows)
    for key, heading in shown.items():
        is_text = key in _TEXT_COLUMNS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in record.rows:
        table.add_row(*cells(shown, row))
    Console(width=_MAX_WIDTH, soft_wrap=True, markup=False, highlight=False).print(table)


def fill(page: str, results: Path) -> str:
    """Return the page with its tables filled from the stored results.

    The text between `<!-- table:NAME -->` and `<!-- end -->` becomes the table of
    `results/NAME.json`.
    """
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
    table = markdown(record.name, record.rows)
    return f"\n{table}\n\n{record.notes}\n\n`{record.command}` {record.origin}\n\n"
