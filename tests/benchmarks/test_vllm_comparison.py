"""The comparison with vLLM agrees with the records that it is made from."""

from __future__ import annotations

import vllm_comparison

from windlass.tools.common.record import read_record


def test_the_record_is_made_from_the_others() -> None:
    record = read_record(vllm_comparison.RECORDS / "h200-vllm.json")
    assert record.rows == vllm_comparison.compare(vllm_comparison.RECORDS), (
        "run benchmarks/scripts/vllm_comparison.py"
    )


def test_less_time_is_a_higher_ratio() -> None:
    seconds = vllm_comparison.Figure("m", 6.0, "io", "r", "ttft_p50_ms", "TTFT s")
    value = seconds.windlass([{"workload": "io", "ttft_p50_ms": 3000.0}])
    assert (value, seconds.ratio(value)) == (3.0, 2.0)
    rate = vllm_comparison.Figure("m", 100.0, "decode_b1", "r")
    assert rate.ratio(rate.windlass([{"workload": "decode_b1", "decode_tok_s": 150.0}])) == 1.5
