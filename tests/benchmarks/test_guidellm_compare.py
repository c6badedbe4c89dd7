"""Comparison of our figures with guidellm's."""

from __future__ import annotations

from typing import Any

from guidellm_compare import compare


def test_units_and_names_are_converted() -> None:
    def guidellm(latency_s: float) -> dict[str, Any]:
        rate = {"successful": {"mean": 2.0}}
        metrics = dict.fromkeys(("requests_per_second", "output_tokens_per_second"), rate)
        times = {"time_to_first_token_ms": 2.0, "inter_token_latency_ms": 4.0}
        requests = [{**times, "request_latency": latency_s}] * 8
        run = {"metrics": metrics, "requests": {"successful": requests}}
        return {"metadata": {"guidellm_version": "1"}, "benchmarks": [run]}

    ours: dict[str, Any] = {"mean_ttft_ms": 2.1, "median_ttft_ms": 2.0}
    ours |= {"mean_tpot_ms": 4.2, "median_tpot_ms": 4.0}
    ours |= {"mean_e2el_ms": 1500.0, "median_e2el_ms": 1500.0, "completed": 8}
    ours |= {"request_throughput": 2.0, "output_throughput": 1.9}
    rows = {row["figure"]: row for row in compare([ours], [guidellm(1.0), guidellm(2.0)]).rows}
    assert rows["end to end mean, ms"]["guidellm"] == 1500.0
    differences = {figure: row["difference_pct"] for figure, row in rows.items()}
    assert differences == {
        "requests per second": 0.0,
        "output tokens per second": -5.0,
        "TTFT mean, ms": 5.0,
        "TTFT median, ms": 0.0,
        "TPOT mean, ms": 5.0,
        "TPOT median, ms": 0.0,
        "end to end mean, ms": 0.0,
        "end to end median, ms": 0.0,
    }
