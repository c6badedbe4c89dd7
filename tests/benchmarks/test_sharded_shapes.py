"""The kernels of divided weights, listed and called on a CPU with tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sharded_shapes import (
    BLOCK_SIZE,
    Call,
    Settings,
    even_logits,
    list_cases,
    loop_seconds,
    measure,
    measure_case,
)
from torch import Tensor

from tests.models.test_rank_weights import DENSE, MLA
from windlass.core.moe import Routing
from windlass.kernels.batch import LayerKV, StepBatch
from windlass.kernels.ops import choose_ops
from windlass.runner.slots import SlotTables
from windlass.tools.common.record import Record, read_record
from windlass.tools.plan.kernel_times import read_kernel_times

HALF = {"torch_dtype": "bfloat16"}


def run_once(calls: Sequence[Call]) -> float:
    """A timer that runs every copy and takes no time."""
    for call in calls:
        call()
    return 1e-5


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("sharded_shapes.COLD_BYTES", 1e5)  # a few copies
    monkeypatch.setattr("sharded_shapes.HEAD_TOKENS", 4)
    for name, config in (("dense", DENSE), ("mla", MLA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | HALF))
    return Settings(
        models={"dense": {"quantization": "fp8", "quantize_head": True}, "mla": {}},
        folder=tmp_path,
        shares=(1, 2),
        tokens=(1, 4, 20),
        context=24,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_every_weight_is_listed_once(settings: Settings) -> None:
    cases = list_cases(settings)
    assert len({case.key for case in cases}) == len(cases)
    found = {(case.model, case.weight, case.share) for case in cases if case.tokens == 4}
    dense = {weight for model, weight, _ in found if model == "dense"}
    assert dense == {
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", "lm_head"),
        *("attention, 2-byte KV", "attention, 1-byte KV", "norm"),
    }
    assert {("dense", "mlp.down_proj", "1/1"), ("dense", "mlp.down_proj", "1/2")} <= found
    mla = {weight for model, weight, _ in found if model == "mla"}
    assert {"self_attn.q_b_proj", "mlp.gate", "kv_b_proj, queries", "kv_b_proj, outputs"} <= mla
    # Replicated weights are the same on any number of ranks.
    assert ("mla", "self_attn.qkv_proj", "1/1") in found
    assert ("mla", "self_attn.qkv_proj", "1/2") not in found
    experts = {share for model, weight, share in found if weight == "mlp.experts"}
    assert experts == {"1/1", "1/2", "1/2 of experts"}
    assert not [case for case in cases if case.weight == "lm_head" and case.tokens > 4]


def test_divided_weights_have_divided_work(settings: Settings) -> None:
    cases = {(case.weight, case.share, case.tokens): case for case in list_cases(settings)}
    whole, half = (cases["mlp.down_proj", share, 1].kernel for share in ("1/1", "1/2"))
    assert half.num_flops == whole.num_flops / 2
    experts = [cases["mlp.experts", share, 20].kernel for share in ("1/1", "1/2", "1/2 of experts")]
    assert [each.num_flops for each in experts[1:]] == [experts[0].num_flops / 2] * 2
    by_heads = [cases["attention, 2-byte KV", share, 4].kernel for share in ("1/1", "1/2")]
    assert by_heads[1].num_flops == by_heads[0].num_flops / 2


def test_all_kernels_run_and_calibrate_the_plan(settings: Settings, tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "h200-sharded-shapes.json"
    saved: list[Record] = []
    record = measure(settings, run_once, lines.append, saved.append)
    assert [row for row in record.rows if row["us"] is None] == []
    assert saved[-1] == record
    assert len(record.rows) == len(list_cases(settings))
    assert any("fitted" in line for line in lines)
    replace(record, hardware="NVIDIA H200").save(path)
    assert read_record(path).settings["left_out"] == 0
    found = read_kernel_times(tmp_path, "H200")
    assert {check.kind for check in found.checks} >= {
        *("fp8", "bf16", "small", "latent attention", "8-bit latent attention"),
        *("latent prompts", "latent projection"),
    }
    assert found.rates["fp8"].fixed_s == pytest.approx(1e-5, rel=0.3)


def test_rows_read_their_own_blocks(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(SlotTables, "send", lambda _, rows: sent.extend(row.slot for row in rows))
    found: list[StepBatch] = []

    def look(queries: Tensor, kv: LayerKV, batch: StepBatch, *_: object) -> Tensor:
        assert kv.keys.float().abs().sum() > 0
        found.append(batch)
        return queries

    monkeypatch.setattr(
        "sharded_shapes.choose_ops", lambda need: replace(choose_ops(need), attention=look)
    )
    cases = list_cases(settings)
    case = next(each for each in cases if "attention" in each.weight and each.tokens == 4)
    assert "error" not in measure_case(case, run_once)
    assert sent == [0, 1, 2, 3]  # to the device
    (tables,) = found[0].tables
    used = tables[:4, : settings.context // BLOCK_SIZE + 1].flatten()
    assert len(set(used.tolist())) == len(used)


def test_a_failing_kernel_is_reported(settings: Settings) -> None:
    case = list_cases(settings)[0]

    def fail(calls: Sequence[Call]) -> float:
        raise RuntimeError(f"{len(calls)} calls are too many")

    row = measure_case(case, fail)
    assert row["us"] is None
    assert "calls are too many" in row["error"]


def test_kernels_after_the_time_limit_are_left_out(settings: Settings) -> None:
    record = measure(replace(settings, max_seconds=-1.0), run_once, lambda _: None, lambda _: None)
    assert record.rows == []
    assert record.settings["left_out"] == len(list_cases(settings))


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 16])
def test_routing_is_even(ranks: int, tokens: int) -> None:
    routing = Routing(num_experts=16, top_k=8)
    settings = Settings(device=torch.device("cpu"), dtype=torch.float32)
    chosen = even_logits(routing, ranks, tokens, settings).topk(8).indices
    counts = torch.bincount(chosen.flatten(), minlength=16)
    assert counts.max() - counts.min() <= 1
    by_rank = counts.view(ranks, -1).sum(1)
    assert by_rank.tolist() == [tokens * 8 // ranks] * ranks


def test_loops_are_timed() -> None:
    calls: list[int] = []
    assert loop_seconds([lambda: calls.append(1)]) >= 0
    assert len(calls) == 6
