"""Renders records as tables: in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from windlass.tools.common.record import Record

Columns = dict[str, str]  # key of a row, or two keys with a slash -> heading

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
)
# Of the records that windlass' commands make.
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


def _without_unused(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Columns:
    """The columns, without optional ones that no row has."""
    return {
        keys: heading
        for keys, heading in columns.items()
        if keys not in _OPTIONAL_COLUMNS or any(keys in row for row in rows)
    }


def cells(shown: Columns, row: Mapping[str, Any]) -> list[str]:
    """The formatted cells of a row, in the order of the columns."""
    return [" / ".join(cell(row.get(key)) for key in keys.split("/")) for keys in shown]


def markdown(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    shown = _without_unused(columns, rows)
    lines = [list(shown.values()), ["---"] * len(shown), *(cells(shown, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(record: Record, columns: Columns | None = None) -> None:
    """Print the record as a table, by default with the columns of its name.

    Long lines wrap in a narrow terminal and are never truncated.
    """
    shown = _without_unused(columns or COLUMNS[record.name], record.rows)
    table = plain_table()
    for key, heading in shown.items():
        is_text = key in _TEXT_COLUMNS
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in record.rows:
        table.add_row(*cells(shown, row))
    wide_console().print(table)


def plain_table() -> Table:
    return Table(box=None, pad_edge=False)


def wide_console() -> Console:
    """A console that never cuts a table: the terminal wraps long lines."""
    return Console(width=1000, soft_wrap=True, markup=False, highlight=False)
