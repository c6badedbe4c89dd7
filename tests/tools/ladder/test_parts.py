"""Parts of the ladder: options of each rung, requests, weights, and remarks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import CONFIG
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, UnsupportedError
from windlass.tools.common.drive import run_all
from windlass.tools.common.price import Price, price_of
from windlass.tools.common.requests import Request
from windlass.tools.ladder.record import make_record, remark
from windlass.tools.ladder.rungs import all_rungs, choose, make_variants
from windlass.tools.ladder.weights import LadderWeights, WeightInputs
from windlass.tools.ladder.workload import WorkloadMix

RUNGS = all_rungs("int8", spec={"spec": "ngram"}, static={"batching": "static"})
BY_NAME = {rung.name: rung for rung in RUNGS}


def test_rungs_alone_and_stacked() -> None:
    variants = {it.key: it for it in make_variants(RUNGS, None, ["fp8", "gptq", "awq"])}
    keys = list(variants)
    assert keys[:4] == ["naive, alone", "static, alone", "continuous, base", "chunked, both"]
    assert keys.count("fp8, both") == 1
    assert variants["naive, alone"].options["batching"] == "none"
    prefix = variants["prefix, alone"].options
    assert prefix["prefix_caching"]
    assert not prefix["enable_chunked_prefill"]
    assert variants["prefix, stacked"].options["enable_chunked_prefill"]
    assert variants["kv, alone"].weights == "16 bit"
    assert variants["kv, stacked"].weights == "int4"
    assert variants["kv, stacked"].format == "int4, int8 KV"
    everything, last = variants["everything, stacked"], variants["spec, stacked"]
    assert (everything.options, everything.weights) == (last.options, last.weights)
    assert everything.options["spec"] == "ngram"


def test_later_rungs_stack_on_the_requested_weights() -> None:
    variants = {it.key: it for it in make_variants(RUNGS, "int8", ["fp8", "gptq", "awq"])}
    assert variants["int4, stacked"].weights == "int4"
    assert variants["everything, stacked"].weights == "int8"


def test_the_base_is_always_included() -> None:
    assert [rung.name for rung in choose(RUNGS, ["naive", "kv"])] == ["naive", "continuous", "kv"]
    with pytest.raises(ConfigError, match=r"'quick' is not a rung\. Known, in order: naive, "):
        choose(RUNGS, ["naive", "quick"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"workload": "chat,poems"}, "the workload 'poems' is not known"),
        ({"workload": "chat:many"}, "expected an integer share above 0"),
        ({"workload": " , "}, "--workload is empty"),
        ({"num_requests": 0}, "--num-requests must be at least 1"),
        ({"low_rate": -1.0}, "--request-rate must be above 0"),
    ],
)
def test_invalid_workloads_are_rejected(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadMix(**sizes)


@pytest.fixture(scope="module")
def config(tiny: Path) -> EngineConfig:
    return EngineConfig.of(model=str(tiny), load_format="dummy", num_blocks=64, num_threads=1)


def test_a_mix_keeps_the_order_of_turns(config: EngineConfig) -> None:
    mix = WorkloadMix("chat:3,random", 8, 4, prefix_len=40, input_len=6, output_len=6, turns=3)
    low, full = mix.loads(open_model(config).card).values()
    assert (low.max_concurrency, full.max_concurrency) == (1, None)
    assert (len(low.requests), len(full.requests)) == (4, 8)
    followers = [request for request in full.requests if request.follows is not None]
    assert len(followers) == 4
    for request in followers:
        before = full.requests[request.follows or 0]
        assert request.prompt[: len(before.prompt)] == before.prompt
    assert len({request.num_output for request in full.requests}) > 1
    assert mix.loads(open_model(config).card)["sat"] == full


def test_the_driver_respects_arrivals_concurrency_and_turns(config: EngineConfig) -> None:
    engine = build_engine(config, open_model(config).source).engine
    requests = [
        Request([1] * 20, 4),
        Request([1] * 20 + [2] * 9, 3, follows=0),
        Request([3] * 5, 1, at=0.05),
    ]
    found = run_all(engine, requests)
    by_prompt = {timing.num_prompt: timing for timing in found.timings}
    first, second, third = (by_prompt[count] for count in (20, 29, 5))
    assert second.sent_at >= first.ended_at
    assert third.sent_at >= third.due_at
    assert third.due_at - first.due_at == pytest.approx(0.05)
    assert (second.num_cached, third.tpot) == (16, None)
    assert (found.num_output, found.num_prompt, found.num_cached) == (8, 54, 16)
    assert found.prompt_tokens_computed == 54 - 16
    assert first.ttft is not None
    assert 0 < first.ttft <= first.e2el
    in_turn = run_all(engine, [Request([5 + i] * 8, 8) for i in range(3)], max_concurrency=1)
    for before, after in zip(in_turn.timings, in_turn.timings[1:], strict=False):
        assert after.sent_at >= before.ended_at
    assert in_turn.peak_blocks == 1


def test_default_and_given_prices() -> None:
    assert price_of(3.6, "cpu").per_million(100.0) == pytest.approx(10.0)
    assert "cores at" in price_of(None, "cpu").reason
    assert Price(None, "").per_million(100.0) is None
    with pytest.raises(ConfigError, match="--price-per-hour must be above 0, got -1"):
        price_of(-1.0, "cpu")


def test_weights_of_a_quantised_file(default_gguf: Path) -> None:
    options = {"model": str(default_gguf), "device": "cpu"}
    weights = LadderWeights(options, WeightInputs(), print)
    assert (weights.stored, weights.own_rung) == ("q4_1", "int4")
    assert weights.options_of("int4") == {}
    assert "exported as float16" in weights.about("16 bit")
    with pytest.raises(UnsupportedError, match="a CPU has no fp8"):
        weights.options_of("fp8")
    with pytest.raises(UnsupportedError, match="set a checkpoint with --awq MODEL"):
        weights.options_of("awq")
    with pytest.raises(UnsupportedError, match="needs --calibration"):
        LadderWeights(options, WeightInputs(full=True), print).options_of("gptq")
    inputs = WeightInputs(checkpoints={"awq": "somewhere"})
    assert LadderWeights(options, inputs, print).options_of("awq") == {"model": "somewhere"}


def test_a_model_without_16_bit_weights_is_rejected(tmp_path: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    config = {**CONFIG, "quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"model": str(tmp_path), "load_format": "dummy"}
    with pytest.raises(ConfigError, match=r"cannot be loaded in 16 bit: .* with --awq or --gptq"):
        LadderWeights(options, WeightInputs(), print)


def _row(rung: str, mode: str, tok_s: float, **more: Any) -> dict[str, Any]:
    kind = BY_NAME[rung].kind
    row: dict[str, Any] = {"rung": rung, "title": rung, "kind": kind, "mode": mode}
    row |= {"weights": "16 bit", "format": "16 bit", "weights_mib": 98.0, "kernels": []}
    row |= {"kv_token_bytes": 100, "context": 2**20, "max_num_batched_tokens": 512}
    for load in ("low", "sat"):
        figures = {
            "tok_s": tok_s,
            "baseline_tok_s": 10.0,
            "tokens_per_step": 8.0,
            "kv_mean_mib": 2.0,
            "read_mib": 98.0,
        }
        figures |= {"cached_share": 0.0, "prompt_share": 0.3, "drafted": 0, "accepted": 0}
        figures |= {
            "chunked_prompts": 0,
            "requests": 4,
            "tpot_p99_ms": 1.0,
            "kv_mib": 3.0,
            "req_s": tok_s,
        }
        row |= {f"{load}_{key}": value for key, value in figures.items()}
    return row | more


@pytest.mark.parametrize(
    ("rung", "load", "more", "reason"),
    [
        ("spec", "sat", {"sat_drafted": 9, "sat_accepted": 4}, "8 tokens per step already sat"),
        ("spec", "low", {}, "no tokens were drafted"),
        ("kv", "low", {"kv_token_bytes": 55}, "the cache is 2% of the bytes .* saves 45%"),
        ("prefix", "sat", {}, "no prompt shared a prefix with an earlier one"),
        ("prefix", "sat", {"sat_cached_share": 0.5}, "prompts are only 30% of the computed tok"),
        ("int4", "sat", {"kernels": ["int4, kernel: torch"]}, "has no fast kernel for them"),
        ("int8", "sat", {}, "8 tokens per step share one read of the weights, and the step is"),
        ("int8", "sat", {}, "the same 98 MiB of weights, but 8 tokens per step"),
        ("int4", "low", {"low_read_mib": 31.0}, "31 MiB of weights instead of 98 are read for"),
        ("chunked", "low", {}, "no prompt was chunked"),
        ("static", "low", {}, "waits for further requests, which do not arrive"),
    ],
)
def test_remarks_explain_regressions(
    rung: str, load: str, more: dict[str, Any], reason: str
) -> None:
    base = _row("continuous", "base", 100.0)
    text = remark(_row(rung, "alone", 90.0, **more), base, load)
    assert text is not None
    assert ": 0.90x, worse: " in text
    assert re.search(reason, text)


def test_speedups_are_corrected_by_the_machines_speed() -> None:
    slower = {"low_baseline_tok_s": 5.0, "sat_baseline_tok_s": 5.0}
    rows = [
        _row("naive", "alone", 40.0),
        _row("continuous", "base", 100.0),
        {"rung": "fp8", "title": "fp8", "kind": "weights", "mode": "both", "reason": "no fp8"},
        _row("int4", "alone", 100.0, **slower),
        _row("spec", "stacked", 200.0),
        _row("everything", "stacked", 210.0),
    ]
    settings = dict.fromkeys(("workload", "low", "saturation", "base", "text", "price"), "x")
    record = make_record(rows, settings, 3)
    naive, _, missing, int4, _, everything = record.rows
    assert (naive["sat_speedup"], int4["sat_speedup"]) == (0.4, 2.0)
    assert missing["label"] == "fp8: no fp8"
    assert (int4["article_req_s"], everything["article_p50_s"]) == (45, 0.4)
    assert everything["remarks"][1] == "saturation: 5.25x naive"
    assert "they differ by 5% and 5%" in record.notes
    assert "3 rows are still to be measured" in record.notes
