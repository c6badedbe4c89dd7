"""Our figures beside another client's."""

from __future__ import annotations

from typing import Any

from windlass.tools.load.outside import compare


def test_units_and_names_are_brought_together() -> None:
    def guidellm(latency_s: float) -> dict[str, Any]:
        value = {"successful": {"mean": 2.0, "median": 4.0}}
        latency = {"successful": {"mean": latency_s, "median": latency_s}}
        names = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms")
        metrics: dict[str, Any] = dict.fromkeys((*names, "inter_token_latency_ms"), value)
        metrics |= {"request_latency": latency, "request_totals": {"successful": 8}}
        return {"metadata": {"guidellm_version": "1"}, "benchmarks": [{"metrics": metrics}]}

    names = ("ttft", "tpot")
    ours: dict[str, Any] = {f"mean_{name}_ms": 2.1 for name in names}
    ours |= {f"median_{name}_ms": 4.0 for name in names}
    ours |= {"mean_e2el_ms": 1500.0, "median_e2el_ms": 1500.0, "completed": 8}
    ours |= {"request_throughput": 2.0, "output_throughput": 1.9}
    rows = {row["figure"]: row for row in compare([ours], [guidellm(1.0), guidellm(2.0)]).rows}
    assert rows["end to end mean, ms"]["guidellm"] == 1500.0
    differences = {figure: row["difference_pct"] for figure, row in rows.items()}
    assert differences == {
        "requests a second": 0.0,
        "output tokens a second": -5.0,
        "TTFT mean, ms": 5.0,
        "TTFT median, ms": 0.0,
        "TPOT mean, ms": 5.0,
        "TPOT median, ms": 0.0,
        "end to end mean, ms": 0.0,
        "end to end median, ms": 0.0,
    }
