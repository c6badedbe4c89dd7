"""`windlass profile`: classifies every kind of work, and kernels without a scope by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from tests.tools.conftest import Windlass
from windlass.tools import profile
from windlass.tools.profile import kind_of
from windlass.tools.profile_program import CommandTimes


def test_eager_profile(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    args = ("--workload", "decode_b2", "--steps", "3", "-o", trace)
    shown = windlass("profile", tiny, "--load-format", "dummy", "--enforce-eager", *args)
    prefill, decode = shown.split("prefill: 256 tokens")[1].split("decode: 2 tokens")
    for table in (prefill, decode):
        for kind in ("attention", "norm", "rope and KV write", "activation", "sampling", "host"):
            assert f"\n{kind} " in table
        for gemm in ("qkv_proj 64x32", "o_proj 32x32", "gate_up_proj 128x32", "down_proj 32x64"):
            assert f"GEMM {gemm} " in table
        assert "GEMM lm_head 256x32 " in table
    for path in (trace, tmp_path / "trace.prefill.json"):
        events = json.loads(path.read_text())["traceEvents"]
        assert any(event.get("name") == "windlass: attention" for event in events)


def test_a_recorded_step_is_profiled_in_the_mode_that_serves(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    args = ("--workload", "decode_b2", "--steps", "3", "-o", trace, "--device", "cpu")
    shown = windlass("profile", tiny, "--load-format", "dummy", *args)
    prefill, decode = shown.split("prefill: 256 tokens")[1].split("decode: 2 tokens")
    if "program" not in decode:
        pytest.skip("no C++ compiler")
    assert "program: 3 steps" in decode
    for table in (prefill, decode):
        for kind in ("attention", "rope and KV write", "sampling", "host", "embedding"):
            assert f"\n{kind} " in table
        for gemm in (
            "qkv_proj 64x32 with norm",
            "o_proj 32x32",
            "gate_up_proj 128x32 with norm and activation",
            "down_proj 32x64",
        ):
            assert re.search(rf"\nGEMM {gemm} +[\d.]+ +[\d.]+ +2\n", table), gemm
        assert re.search(r"\nGEMM lm_head 256x32 with norm +[\d.]+ +[\d.]+ +1\n", table)
    for path in (trace, tmp_path / "trace.prefill.json"):
        events = json.loads(path.read_text())["traceEvents"]
        assert any(event["name"] == "windlass: attention" for event in events)


def test_timed_commands_compute_the_same(tiny: Path) -> None:
    from windlass import LLM, SamplingParams
    from windlass.build import build_engine, open_model
    from windlass.config import EngineConfig

    config = EngineConfig.of(model=str(tiny), load_format="dummy", device="cpu")
    opened = open_model(config)
    built = build_engine(config, opened.source)
    llm = LLM.over(opened.card, built)
    pool = built.weights.parts.workers.pool
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain = llm.generate(["abc"], greedy)[0].outputs[0].token_ids
    times = CommandTimes({})
    with pool.timed_by(times):
        timed = llm.generate(["abc"], greedy)[0].outputs[0].token_ids
    assert timed == plain
    assert {"GEMM", "attention"} <= {kind.split(" with")[0] for kind in times.spent()}
    assert pool.timer is None


def test_network_is_restored(tiny: Path) -> None:
    from windlass.build import build_engine, open_model
    from windlass.config import EngineConfig

    config = EngineConfig.of(model=str(tiny), load_format="dummy")
    network = build_engine(config, open_model(config).source).weights.network
    before = [dict(vars(module)) for module in network.modules()]
    with profile._scopes(network):
        assert [dict(vars(module)) for module in network.modules()] != before
    assert [dict(vars(module)) for module in network.modules()] == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("paged_decode_kernel", "attention"),
        ("paged_combine_kernel", "attention"),
        ("void flash_fwd_kernel<...>", "attention"),
        ("add_rms_norm_kernel", "norm"),
        ("rope_write_kernel", "rope and KV write"),
        ("silu_mul_kernel", "activation"),
        ("sample_part_kernel", "sampling"),
        ("nvjet_tst_64x8", "GEMM nvjet_tst_64x8"),
        ("void at::native::reduce_kernel<512, ArgMax>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_classified_by_name(name: str, kind: str) -> None:
    assert kind_of(name, []) == kind


def test_scopes_classify_their_operators() -> None:
    inside = ["aten::linear", "windlass: GEMM o_proj 8x8", "windlass step"]
    assert kind_of("aten::mm", inside) == "GEMM o_proj 8x8"
    assert kind_of("aten::copy_", ["aten::to", "windlass step"]) == "copies"


def test_kernels_count_once_and_scopes_never() -> None:
    def event(name: str, device: DeviceType, us: float = 0.0, **values: object) -> FunctionEvent:
        return FunctionEvent(0, name, 0, 0.0, us, device_type=device, **values)

    step = event("windlass step", DeviceType.CPU)
    scope = event("windlass: GEMM o_proj 8x8", DeviceType.CPU)
    operator = event("aten::mm", DeviceType.CPU)
    operator.cpu_parent, scope.cpu_parent = scope, step
    operator.append_kernel("nvjet", 0, 5.0)
    scope.append_kernel("windlass: GEMM o_proj 8x8", 0, 5.0)
    on_device = [
        event("nvjet", DeviceType.CUDA, 5.0),
        event("windlass: GEMM o_proj 8x8", DeviceType.CUDA, 5.0),
        event("windlass step", DeviceType.CUDA, 9.0),
        event("paged_decode_kernel", DeviceType.CUDA, 3.0),  # replayed from a captured graph
        event("nvjet", DeviceType.CUDA, 2.0),
    ]
    assert profile._device_time([step, scope, operator, *on_device]) == {
        "GEMM o_proj 8x8": (5.0, 1),
        "attention": (3.0, 1),
        "GEMM nvjet": (2.0, 1),
    }


@pytest.mark.parametrize("steps", [0, -1])
def test_zero_steps_are_refused(windlass: Windlass, tiny: Path, steps: int) -> None:
    assert "--steps must be at least 1" in windlass("profile", tiny, "--steps", steps, code=2)
