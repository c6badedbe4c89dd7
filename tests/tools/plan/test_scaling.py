"""The scaling model: collectives, kernels, memory and pipelines of several GPUs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.comparison import TINY
from tests.models.test_granite_hybrid import config_of as hybrid_config
from tests.models.test_rank_weights import DENSE, MLA, MOE, opened, rank_weights
from tests.steps import make_inputs
from tests.tools.conftest import Windlass
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.core.types import Row, SlotInit, StepPlan
from windlass.errors import ConfigError
from windlass.kernels.batch import KVCache
from windlass.kernels.ops import choose_ops
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.loader import load
from windlass.models.network import Parts, kernel_need, kv_layout, make_network
from windlass.models.rank_weights import RankDemand, RankShape, smallest_fit
from windlass.models.source import resolve
from windlass.parallel.mesh import Mesh, SingleRank
from windlass.quant.unquantised import Unquantised
from windlass.runner.eager import ReferenceMetadata, step_batch
from windlass.runner.slots import SlotTables
from windlass.tools.common.price import Price
from windlass.tools.common.record import Record
from windlass.tools.plan.fabric import Collective, Fabric
from windlass.tools.plan.kernel_times import (
    DEFAULT_RATES,
    Kernel,
    KernelTimes,
    MeasuredKernel,
    Rate,
    fit,
    read_kernel_times,
)
from windlass.tools.plan.rank_work import StepSize, busiest_pairs, expert_share
from windlass.tools.plan.scaling import Gpu, ScalingModel, ScalingPlan, ScalingQuery

CPU = torch.device("cpu")
HALF = {"torch_dtype": "bfloat16"}
HIDDEN, VOCAB = 128, 200
GPU = Gpu("H200", 2**33, "as given", Price(4.0, "as given"))
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def model_of(folder: Path, config: dict[str, Any], gpu: Gpu = GPU, **options: Any) -> ScalingModel:
    (folder / "config.json").write_text(json.dumps(config | HALF))
    settings = EngineConfig.of(model=str(folder), load_format="dummy", **options)
    return ScalingModel(settings, gpu=gpu, times=KernelTimes(), fabric=Fabric())


def work_of(model: ScalingModel, shape: RankShape, size: StepSize) -> list[list[tuple[str, int]]]:
    """Kinds and bytes of the collectives of each stage."""
    work = model.work(shape)
    stages = [work.stage(stage, size) for stage in work.network.stages(shape.pp)]
    return [[(each.kind, each.num_bytes) for each in stage.collectives] for stage in stages]


def step_work(
    model: ScalingModel, shape: RankShape, tokens: int, num_sampled: int
) -> list[tuple[str, int]]:
    """The collectives of a step with one stage. If it samples nothing, it has no logits to gather."""
    (found,) = work_of(model, shape, StepSize(tokens, rows=max(1, num_sampled), context=1))
    return found if num_sampled else found[:-1]


def test_dense_layers_reduce_twice(tmp_path: Path) -> None:
    model = model_of(tmp_path, DENSE)
    stream, row = 7 * HIDDEN * 2, HIDDEN * 2
    (found,) = work_of(model, RankShape(tp=4), StepSize(tokens=7, rows=1, context=4))
    embedding, first_layers, last_layer = 1, 2 * 2, 2
    assert found == [
        *[("all-reduce", stream)] * (embedding + first_layers),
        *[("all-reduce", row)] * last_layer,
        ("all-gather", VOCAB * 2),
    ]
    assert work_of(model, RankShape(), StepSize.decode(7, 4)) == [[]]


def test_stages_send_the_residual_stream(tmp_path: Path) -> None:
    model = model_of(tmp_path, DENSE)
    found = work_of(model, RankShape(pp=3), StepSize.decode(7, 4))
    assert found == [[("send", 7 * HIDDEN * 2)], [("send", 7 * HIDDEN * 2)], []]


@pytest.mark.parametrize("ep", [False, True])
def test_experts_reduce_once_and_shared_experts_again(ep: bool, tmp_path: Path) -> None:
    size = StepSize.decode(7, 4)
    (moe,) = work_of(model_of(tmp_path, MOE), RankShape(tp=2, expert_parallel=ep), size)
    assert len(moe) == 1 + 3 * 2 + 1
    (mla,) = work_of(model_of(tmp_path, MLA), RankShape(tp=2, expert_parallel=ep), size)
    dense, mixtures = 2, 2 * 3
    assert len(mla) == 1 + dense + mixtures + 1


def test_all_to_all_moves_rows_of_used_ranks(tmp_path: Path) -> None:
    work = model_of(tmp_path, MLA).work(RankShape(tp=2, expert_parallel=True))
    found = work.expert_combine(8)
    stream, used = 8 * HIDDEN * 2, 1 - 0.5**2  # two experts per token
    assert found["all-reduce"] == [Collective("all-reduce", stream, 2)] * 2
    both = [Collective("all-to-all", int(used * stream), 2), Collective("all-gather", stream, 2)]
    assert found["all-to-all"] == both * 2


@dataclass
class RecordingGroup:
    """The first of `size` ranks, alone; keeps the collectives."""

    size: int
    rank: int = 0
    found: list[tuple[str, int]] = field(default_factory=list)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.found.append(("all-reduce", x.nbytes))
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.found.append(("all-gather", x.nbytes // x.shape[-1] * sum(widths)))
        return torch.nn.functional.pad(x, (0, sum(widths) - x.shape[-1]))


def recorded(folder: Path, tp: int, ep: bool, chunks: Sequence[int]) -> list[list[tuple[str, int]]]:
    """The collectives of each real step of one request, in float32; the last one samples."""
    config = EngineConfig.of(model=str(folder), load_format="dummy", dtype="float32").model
    files = resolve(config)
    hparams, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    group = RecordingGroup(tp)
    mesh = Mesh(tp=group, ep=RecordingGroup(tp) if ep else SingleRank())
    need = kernel_need(hparams, device=CPU, dtype=torch.float32, plain=True, mesh=mesh)
    plain = Unquantised(torch.float32)
    parts = Parts(torch.float32, CPU, 64, choose_ops(need), lambda _, __: plain, mesh=mesh)
    network = make_network(hparams, parts)
    load(network, checkpoint, CPU)
    layout = kv_layout(hparams, 4, torch.float32, mesh)
    num_groups, num_blocks = len(layout.groups), -(-sum(chunks) // 4)
    cache = KVCache(layout, num_groups * num_blocks, torch.float32, CPU)
    slots = SlotTables(1, num_blocks, 4, CPU, num_groups=num_groups)
    ids = tuple(range(3, 3 + sum(chunks)))
    admission = SlotInit("r", 0, list(ids), len(ids), SamplingParams(), frozenset(), 0)
    found, start = [], 0
    for count in chunks:
        end = start + count
        fresh = range(-(-start // 4), -(-end // 4))
        blocks = tuple(i * num_blocks + block for i in range(num_groups) for block in fresh)
        row = Row("r", 0, start, count, ids[start:end], blocks, end == len(ids))
        plan = StepPlan([row], [admission] if start == 0 else [])
        with torch.inference_mode():
            inputs = make_inputs(plan, slots)
            x, batch = step_batch(inputs, slots, cache.layers, ReferenceMetadata(slots))
            hidden = network(x, batch)
            if row.sample:
                network.logits(hidden)
        found.append(group.found.copy())
        group.found.clear()
        start = end
    return found


NORMS = DENSE | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
ONE_BILLION = DENSE | {  # TinyLlama's sizes, in two of its layers
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}


PROMPT = (24, 13, 1)  # two chunks, and the next token


@pytest.mark.parametrize("chunks", [(7,), PROMPT], ids=str)
@pytest.mark.parametrize(
    ("config", "ep"),
    [
        (DENSE, False),
        (DENSE | {"tie_word_embeddings": True}, False),
        (NORMS, False),
        (MOE, True),
        (MLA, False),
        (MLA, True),
        (ONE_BILLION, False),
    ],
)
def test_collectives_are_those_of_a_real_step(
    config: dict[str, Any], ep: bool, chunks: tuple[int, ...], tmp_path: Path
) -> None:
    model = model_of(tmp_path, config, dtype="float32")
    shape = RankShape(tp=2, expert_parallel=ep)
    ends = [0] * (len(chunks) - 1) + [1]
    expected = [step_work(model, shape, *each) for each in zip(chunks, ends, strict=True)]
    assert recorded(tmp_path, 2, ep, chunks) == expected


def test_mamba_layers_reduce_the_square_mean_of_their_norm(tmp_path: Path) -> None:
    """`windlass plan` does not have them; docs/parallel.md does."""
    (tmp_path / "config.json").write_text(json.dumps(hybrid_config()))
    size, vocab = (TINY[name] * 4 for name in ("hidden_size", "vocab_size"))
    (*_, chunk, token) = recorded(tmp_path, 2, False, PROMPT)
    for tokens, found, gathered in ((PROMPT[1], chunk, []), (1, token, [("all-gather", vocab)])):
        norm, stream, last = (
            ("all-reduce", num_bytes) for num_bytes in (tokens * 4, tokens * size, size)
        )
        embedding, attention = [stream], [stream, stream]
        mamba, last_mamba = [norm, stream, stream], [norm, last, last]
        assert found == [*embedding, *mamba, *attention, *last_mamba, *gathered]


def test_all_reduce_takes_the_fastest_algorithm() -> None:
    fabric = Fabric(bandwidth=1e9, share=1.0, launch_s=1e-6, sync_s=4e-6, hop_s=1e-6)
    small, large = (Collective("all-reduce", size, 8) for size in (8, 10**9))
    assert (fabric.algorithm(small), fabric.algorithm(large)) == ("one-shot", "two-shot")
    assert fabric.seconds(small) == pytest.approx(1e-6 + 4e-6 + 7 * 8e-9)
    assert fabric.seconds(large) == pytest.approx(1e-6 + 2 * 4e-6 + 2 * 7 / 8)
    few = Collective("all-reduce", 10**9, 2)
    assert fabric.algorithm(replace(few, num_bytes=10**5)) in ("one-shot", "ring")
    assert fabric.seconds(replace(few, num_ranks=1)) == 0
    gather = Collective("all-gather", 10**9, 4)
    assert fabric.seconds(gather) == pytest.approx(1e-6 + 4e-6 + 0.75)
    assert fabric.seconds(Collective("send", 10**9, 2)) == pytest.approx(1e-6 + 4e-6 + 1)


def test_the_busiest_rank_and_its_experts() -> None:
    assert busiest_pairs(64, 1) == 64
    mean, deviation = 8, math.sqrt(8 * 7 / 8)
    assert busiest_pairs(64, 8) == pytest.approx(mean + deviation * math.sqrt(2 * math.log(8)))
    assert busiest_pairs(1, 8) == 1  # no rank has more pairs than there are
    assert expert_share(0, 8) == 0
    assert expert_share(1, 8) == pytest.approx(1 / 8)
    assert expert_share(10_000, 8) == pytest.approx(1)


def test_fit_finds_the_rates_and_the_worst_kernel() -> None:
    rate = Rate(bandwidth=2.5e12, flops=600e12, fixed_s=6e-6)
    kernels = [
        Kernel("fp8", num_bytes, tokens * num_bytes * 2)
        for num_bytes in (1e6, 8e6, 60e6, 400e6)
        for tokens in (1, 64, 512, 2048)
    ]
    points = [
        MeasuredKernel(f"kernel {i}", kernel, rate.seconds(kernel))
        for i, kernel in enumerate(kernels)
    ]
    odd = replace(points[0], name="odd", seconds=2 * points[0].seconds)
    found = fit([*points, odd], "measured")
    for name in ("bandwidth", "flops", "fixed_s"):
        assert getattr(found.rates["fp8"], name) == pytest.approx(getattr(rate, name), rel=0.15)
    (check,) = found.checks
    assert (check.num_points, check.worst) == (17, "odd")
    assert check.median_error < 0.05
    assert "17 measured kernels" in found.verdict(["fp8"])
    assert found.verdict(["fp8", "small"]).endswith("; not checked: small")
    assert found.rates["bf16"] == DEFAULT_RATES["bf16"]


def test_few_points_check_the_defaults() -> None:
    kernel = Kernel("fp8", 1e6)
    point = MeasuredKernel("one", kernel, DEFAULT_RATES["fp8"].seconds(kernel) / 2)
    found = fit([point], "measured")
    assert found.rates["fp8"] == DEFAULT_RATES["fp8"]
    assert found.checks[0].worst_error == pytest.approx(1.0)


def row_of(**changes: Any) -> dict[str, Any]:
    row = {"model": "m", "weight": "o_proj", "share": "1/2", "tokens": 8, "kind": "fp8"}
    return row | {"us": 10.0, "bytes": 1e6, "flops": 1e6} | changes


def test_records_of_this_gpu_are_read(tmp_path: Path) -> None:
    path = tmp_path / "h200-sharded-shapes.json"
    assert read_kernel_times(None, "H200").checks == ()
    assert read_kernel_times(tmp_path, "H200").verdict([]).startswith("not checked")
    rows = [row_of(), row_of(us=None)]  # a kernel that was refused
    Record("sharded_shapes", rows, hardware="16 cores, NVIDIA H200").save(path)
    assert read_kernel_times(tmp_path, "H200").checks[0].num_points == 1
    assert read_kernel_times(tmp_path, "B200").checks == ()
    for bad in (row_of(kind="int3"), row_of(us=-1.0), {}):
        Record("sharded_shapes", [bad], hardware="NVIDIA H200").save(path)
        with pytest.raises(ConfigError, match=r"is not a record of .*sharded_shapes\.py"):
            read_kernel_times(tmp_path, "H200")


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ("h200-llama-3.1-8b", {}),
        (
            "h200-llama-3.1-8b-fp8",
            {"quantization": "fp8", "quantize_head": True, "kv_cache_dtype": "fp8"},
        ),
    ],
)
def test_default_rates_predict_the_records_of_one_gpu(record: str, options: Any) -> None:
    config = EngineConfig.of(
        model=str(BENCHMARKS / "models/llama-3.1-8b"), load_format="dummy", **options
    )
    model = ScalingModel(config, gpu=GPU, times=KernelTimes(), fabric=Fabric())
    work = model.work(RankShape())
    (stage,) = work.network.stages(1)
    rows = json.loads((BENCHMARKS / f"{record}.json").read_text())["rows"]
    measured = {
        row["requests"]: row["decode_step_ms"] for row in rows if "decode" in row["workload"]
    }
    assert len(measured) == 4
    for requests, step_ms in measured.items():
        kernels = work.stage(stage, StepSize.decode(requests, 256)).kernels
        predicted = 1e3 * sum(map(KernelTimes().seconds, kernels))
        assert predicted == pytest.approx(step_ms, rel=0.3), requests


def test_micro_batches_fill_the_stages(tmp_path: Path) -> None:
    model = model_of(tmp_path, DENSE | {"num_hidden_layers": 4})
    found = model.plan(ScalingQuery(devices=2, tp=1, pp=2, context=16))
    one, eight = found.layouts[0].batch(1), found.layouts[0].batch(8)
    assert one.bubble == pytest.approx(0.5, abs=0.01)
    assert eight.bubble < 0.3  # the stages differ: one has the head
    alone = model.plan(ScalingQuery(devices=1, context=16)).layouts[0]
    assert one.tpot_ms > alone.batch(1).tpot_ms  # the send
    assert one.usd_per_million == pytest.approx(2 * 4 / 3600 / one.tok_s * 1e6, rel=1e-3)


def plan_of(
    folder: Path, config: dict[str, Any], query: ScalingQuery, **options: Any
) -> ScalingPlan:
    return model_of(folder, config, **options).plan(query)


def test_all_layouts_of_the_devices_are_compared(tmp_path: Path) -> None:
    found = plan_of(tmp_path, MOE, ScalingQuery(devices=4, context=32))
    names = {layout.name for layout in found.layouts}
    assert names == {
        *("tp 1, 4 replicas", "tp 1, pp 2, 2 replicas"),
        *("tp 2, 2 replicas", "tp 2, ep 2, 2 replicas", "tp 2, pp 2", "tp 2, pp 2, ep 2"),
        *("tp 4", "tp 4, ep 4"),
    }
    assert list(found.refused) == ["tp 1, pp 4"]  # three layers
    assert found.best is not None
    assert found.reason.startswith(found.best.name)
    experts = next(layout for layout in found.layouts if layout.name == "tp 4, ep 4")
    assert experts.options == {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    for layout in found.layouts:
        assert EngineConfig.of(**layout.options).parallel.num_ranks == layout.tp * layout.pp
    assert set(experts.expert_combine_ms) == {"all-reduce", "all-to-all"}
    for layout in found.layouts:
        assert (layout.split_ttft_ms != layout.ttft_ms) == (layout.tp > 1)
    json.dumps([item.value for item in found.assumptions])
    sources = {item.name: item.source for item in found.assumptions}
    assert "not measured" in sources["link share"]
    assert "not checked" in sources["bf16 kernels"]


def test_expert_parallelism_needs_two_ranks(tmp_path: Path) -> None:
    model = model_of(tmp_path, MOE)
    for query in (ScalingQuery(devices=1), ScalingQuery(devices=2, tp=1)):
        with pytest.raises(ConfigError, match="--tensor-parallel-size, which is 1"):
            model.plan(replace(query, expert_parallel=True))
    only = model.plan(ScalingQuery(devices=4, expert_parallel=True)).layouts
    assert {layout.ep for layout in only} == {2, 4}


def test_memory_of_a_layout_adds_up(tmp_path: Path) -> None:
    model = model_of(tmp_path, DENSE, memory_share=0.5, block_size=16)
    (layout,) = model.plan(ScalingQuery(devices=2, tp=2, context=32)).layouts
    reserve = 3 * 2**30
    assert layout.kv_bytes == 2**32 - reserve - layout.weight_bytes - layout.step_bytes
    assert layout.kv_token_bytes == 3 * 2 * 1 * 16 * 2  # layers, K and V, heads, dim, bytes
    assert layout.max_tokens == layout.kv_bytes // (16 * layout.kv_token_bytes) * 16


def test_too_little_memory_names_the_smallest_number_that_fits(tmp_path: Path) -> None:
    big = DENSE | {"hidden_size": 1024, "vocab_size": 40_000, "intermediate_size": 4096}
    gpu = replace(GPU, memory=(3 * 2**30 + 250 * 2**20) * 100 // 85)
    model = model_of(tmp_path, big, gpu=gpu, max_num_batched_tokens=512)
    found = model.plan(ScalingQuery(devices=1, context=64))
    assert found.best is None
    assert "nothing fits: the nearest is tp 1" in found.reason
    assert "tokens is 2 (tp 2)" in found.reason
    assert model.plan(ScalingQuery(devices=2, context=64)).best is not None


def test_smallest_fit_prefers_tensor_parallel_ranks(tmp_path: Path) -> None:
    hparams, parts = opened(tmp_path, DENSE)
    demand = RankDemand(kv_tokens=16, block_size=16, kv_dtype=torch.float16)
    ((whole,),) = rank_weights(hparams, parts, RankShape())
    fit_in = smallest_fit(hparams, parts, demand, 2 * whole)
    assert fit_in == RankShape()
    assert smallest_fit(hparams, parts, demand, int(0.9 * whole)) == RankShape(tp=2)
    # Three stages of one layer each need less than two ranks; three ranks cannot divide the heads.
    assert smallest_fit(hparams, parts, demand, int(0.47 * whole)) == RankShape(pp=3)
    assert smallest_fit(hparams, parts, demand, 1) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "3"), "Numbers of shards that work: 1, 2, 4"),
        (("-tp", "2", "--ep"), "LlamaForCausalLM has no experts"),
        (("--devices", "2", "--ep"), "LlamaForCausalLM has no experts"),
        (("--tp", "16", "--pp", "8"), "128 ranks; at most 64"),
        (("--devices", "65"), "--devices must be from 1 to 64"),
        (("--devices", "4", "--tp", "3"), "--devices 4 is no multiple of the 3 ranks"),
        (("--tp", "0"), "must be at least 1, got 0 and 1"),
        (("-pp", "9"), "the model has 2 layers"),
        (("--devices", "2", "--formats", "int4"), "--formats only applies to one device"),
        (("--explain",), "--explain only applies with --devices or --tensor-parallel-size"),
        (("--devices", "2", "--device", "cpu"), "--device cpu: only GPUs are planned together"),
        (("--devices", "2", "--num-blocks", "9"), "--num-blocks is chosen by the plan"),
        (("--devices", "2", "--link-bandwidth", "0"), "--link-bandwidth must be above 0"),
    ],
)
def test_bad_input_is_refused(
    flags: tuple[str, ...], message: str, windlass: Windlass, tiny: Path
) -> None:
    shown = windlass("plan", tiny, "--load-format", "dummy", *flags, code=2)
    assert message in " ".join(shown.split())


def test_plan_prints_layouts_and_a_command(windlass: Windlass, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    flags = ("--load-format", "dummy", "--devices", "2", "--context", "64", "--records", tmp_path)
    shown = windlass("plan", tiny, *flags, "--explain", "--json", output)
    assert "tp 1, 2 replicas" in shown
    assert "not checked" in shown
    assert "link bandwidth: 450 GB/s" in shown
    assert "Recommended: " in shown
    written = json.loads(output.read_text())
    assert written["command"] in shown
    assert {"name", "value", "source"} == set(written["assumptions"][0])
    assert [each["requests"] for each in written["layouts"][0]["batches"]] == [1, 8, 64, 256]
