"""Ranks on one GPU: NCCL and symmetric memory with one rank, inside captured graphs; ranks that share the GPU.

Ranks that share a GPU exchange tensors through host memory, or through symmetric memory, for which one
process has several buffers and streams, or two processes have one buffer each.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu.test_families import CASES, COMMON, GREEDY, PROMPTS, load, tokens
from windlass import LLM
from windlass.build import _finish, open_model
from windlass.build_rank import BuildLog, build_rank
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.kernels.token_split import TokenSplit
from windlass.kernels.triton.all_reduce import BUFFER_BYTES
from windlass.layers.linear import Linear
from windlass.parallel.mesh import Mesh
from windlass.runner.collectives import SymmetricMemoryGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE: dict[str, Any] = {**COMMON, "architectures": ["LlamaForCausalLM"]}
SIZES = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    return tmp_path


def nccl(folder: Path) -> Any:
    from torch._C import _distributed_c10d as c10d

    from windlass.parallel.nccl import NcclGroup

    store = c10d.FileStore(str(folder / "store"), 1)
    return NcclGroup(store, 0, 1, torch.device("cuda", 0))


def symmetric(folder: Path, num_bytes: int) -> Any:
    from torch._C import _distributed_c10d as c10d

    from windlass.parallel.nccl import share_memory

    store, device = c10d.FileStore(str(folder / "memory"), 1), torch.device("cuda", 0)
    return share_memory(store, 0, 1, device=device, num_bytes=num_bytes, name=str(folder))


def test_collectives_are_captured(tmp_path: Path) -> None:
    group = nccl(tmp_path)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    static = x.clone()

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return group.all_reduce(static * 2), group.all_gather(static, [64])

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total, gathered = compute()
    static.copy_(x + 1)
    graph.replay()
    torch.testing.assert_close(total, (x + 1) * 2)
    torch.testing.assert_close(gathered, x + 1)
    moved = group.all_to_all(x, sent=[8], received=[8])
    torch.testing.assert_close(moved, x)
    torch.testing.assert_close(group.reduce_scatter(x, [8]), x)
    torch.testing.assert_close(group.all_gather(x.flatten(), [x.numel()]), x.flatten())


def test_stages_exchange_tensors_by_nccl(tmp_path: Path) -> None:
    from torch._C import _distributed_c10d as c10d

    from windlass.parallel.nccl import NcclGroup

    group = NcclGroup(c10d.FileStore(str(tmp_path / "store"), 1), 0, 1)
    x, found = torch.randn(8, 64, device="cuda").bfloat16(), torch.zeros(8, 64, device="cuda")
    found = found.bfloat16()
    group._backend._group_start()  # a rank can send to itself only within a group
    sending, receiving = group.send(x * 2, 0), group._backend.recv([found], 0, 0)
    group._backend._group_end()
    sending.wait()
    receiving.wait()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, x * 2)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "with a norm"])
@pytest.mark.parametrize(("ranks", "rows", "size"), [(1, 3, 576), (2, 1, 4096), (4, 16, 2048)])
@pytest.mark.parametrize("two_shot", [False, True])
def test_sums_over_buffers_of_one_process(
    ranks: int, rows: int, size: int, two_shot: bool, fused: bool
) -> None:
    """Every rank is a stream with captured calls of different sizes, replayed several times."""
    from windlass.kernels.triton.all_reduce import BUFFER_BYTES, SharedBuffers
    from windlass.layers.norm import RMSNorm

    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    buffers = torch.zeros(ranks, BUFFER_BYTES, dtype=torch.uint8, device=device)
    addresses = [buffer.data_ptr() for buffer in buffers]
    shared = [SharedBuffers.of(rank, addresses, device) for rank in range(ranks)]
    inputs = torch.randn(3, ranks, rows, size, device=device).bfloat16()  # of three calls
    residuals = torch.zeros(3, ranks, rows, size, device=device).bfloat16()
    norm = RMSNorm(size, 1e-5, torch.bfloat16, None).to(device)  # type: ignore[arg-type]
    norm.weight.data.uniform_(0.5, 1.5)

    def compute(rank: int) -> list[torch.Tensor]:
        found: list[Any] = []
        for call, count in enumerate((rows, 1, rows)):
            x = inputs[call, rank, :count]
            if fused:
                residual = residuals[call, rank, :count]
                out, _ = shared[rank].all_reduce_norm(x, residual, norm, two_shot=two_shot)
                found.append(out)
            else:
                found.append(shared[rank].all_reduce(x, two_shot=two_shot))
        return found

    streams = [torch.cuda.Stream() for _ in range(ranks)]
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in range(ranks)], []
    # A process cannot load kernels while another one waits: at first, all flags are set.
    buffers.view(torch.int32).fill_(2**30)
    for rank, (stream, graph) in enumerate(zip(streams, graphs, strict=True)):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            compute(rank)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append(compute(rank))
        graph.replay()
    torch.cuda.synchronize()
    buffers.zero_()
    for each in shared:
        each.counters.zero_()
    for turn in range(5):
        inputs.copy_(torch.randn(inputs.shape, device=device))
        residuals.zero_()
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for call, count in enumerate((rows, 1, rows)):
            total = torch.zeros(count, size, device=device)
            for rank in range(ranks):
                total += inputs[call, rank, :count].float()
            want = total.bfloat16()
            for rank in range(ranks):
                if fused:
                    assert torch.equal(residuals[call, rank, :count], want), (turn, call, rank)
                    scale = torch.rsqrt(want.float().square().mean(-1, keepdim=True) + 1e-5)
                    expected = (want.float() * scale).bfloat16() * norm.weight
                    torch.testing.assert_close(outputs[rank][call], expected)
                else:
                    assert torch.equal(outputs[rank][call], want), (turn, call, rank)


def test_a_kernel_that_waits_for_a_lost_rank_is_released() -> None:
    device = torch.device("cuda", 0)
    buffers = torch.zeros(2, BUFFER_BYTES, dtype=torch.uint8, device=device)
    ranks: Any = SimpleNamespace(rank=0, size=2)
    memory: Any = SimpleNamespace(
        buffer=buffers[0], addresses=[buffer.data_ptr() for buffer in buffers]
    )
    group = SymmetricMemoryGroup(ranks, memory, device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        group.all_reduce(torch.ones(3, 512, device=device))
        ended = torch.cuda.Event()
        ended.record()
    assert not ended.query()
    group.release()
    ended.synchronize()


def sum_as_rank(rank: int, folder: str, results: Any) -> None:
    from torch._C import _distributed_c10d as c10d

    from windlass.kernels.triton.all_reduce import BUFFER_BYTES, SharedBuffers
    from windlass.parallel.nccl import share_memory

    device = torch.device("cuda", 0)
    memory = share_memory(
        c10d.FileStore(f"{folder}/memory", 2),
        rank,
        2,
        device=device,
        num_bytes=BUFFER_BYTES,
        name="two",
    )
    shared = SharedBuffers.of(rank, memory.addresses, device)
    found = []
    for call in range(20):
        x = torch.full((1 + call % 3, 1024), float(call + 10 * rank), device=device).bfloat16()
        found.append(shared.all_reduce(x, two_shot=call % 2 == 1).unique().tolist())
    results.put((rank, found))


def test_two_processes_sum_in_symmetric_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=sum_as_rank, args=(rank, str(tmp_path), results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    want = [[2.0 * call + 10] for call in range(20)]
    assert found == {0: want, 1: want}


@pytest.mark.parametrize("collectives", ["nccl", "symmetric memory"])
def test_an_engine_with_collectives_in_its_graphs(
    collectives: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All projections back into the residual stream are summed, as those of a shard are."""
    options = {"model": str(folder), "load_format": "dummy", **SIZES}
    config = EngineConfig.of(**options)
    opened = open_model(config)
    want = tokens(load(folder))
    made = Linear.__init__

    def partial(self: Linear, *args: Any, **values: Any) -> None:
        made(self, *args, **values)
        self.is_partial = any(part.endswith(("o_proj", "down_proj")) for part in self.outputs)

    monkeypatch.setattr(Linear, "__init__", partial)
    log = BuildLog()
    group = nccl(tmp_path)
    if collectives == "symmetric memory":
        memory = symmetric(tmp_path, BUFFER_BYTES)
        group = SymmetricMemoryGroup(group, memory, torch.device("cuda", 0))
    rank = build_rank(config, opened.source, log, mesh=Mesh(tp=group))
    llm = LLM.over(opened.card, _finish(rank, opened.source, log, "none"))
    found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]
    assert sum(a == b for a, b in zip(found, want, strict=True)) / len(want) >= 0.8


@pytest.mark.parametrize("case", ["dense", "qwen3-moe"])
def test_two_ranks_on_one_gpu(folder: Path, case: str) -> None:
    if case != "dense":
        (folder / "config.json").write_text(json.dumps(COMMON | CASES[case]))
    one = load(folder, dtype="float32")
    two = load(folder, dtype="float32", tensor_parallel_size=2, distributed_backend="gloo")
    assert tokens(two) == tokens(one)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> set[torch.dtype]:
    """The types of the rows that rank 0 gathered in split steps."""
    found: set[torch.dtype] = set()
    gather = TokenSplit.gather_rows

    def recorded(self: TokenSplit, x: torch.Tensor) -> torch.Tensor:
        found.add(x.dtype)
        return gather(self, x)

    monkeypatch.setattr(TokenSplit, "gather_rows", recorded)
    return found


SHARED = {"tensor_parallel_size": 2, "distributed_backend": "gloo"}
SPLIT = SHARED | {"enable_sequence_parallel": True, "sequence_parallel_min_tokens": 16}


@pytest.mark.parametrize("case", ["dense", "qwen3-moe", "deepseek-v3"])
def test_prompts_split_over_two_ranks(folder: Path, case: str, gathered: set[torch.dtype]) -> None:
    if case != "dense":
        (folder / "config.json").write_text(json.dumps(COMMON | CASES[case]))
    one = load(folder, dtype="float32")
    two = load(folder, dtype="float32", **SPLIT)
    assert tokens(two) == tokens(one)
    assert gathered == {torch.float32}


def test_split_prompts_are_gathered_in_fp8(folder: Path, gathered: set[torch.dtype]) -> None:
    """Norms quantise the rows of a rank's own tokens, and ranks exchange codes and scales."""
    whole = tokens(load(folder, quantization="fp8", **SHARED))
    halves = tokens(load(folder, quantization="fp8", **SPLIT))
    assert sum(a == b for a, b in zip(halves, whole, strict=True)) / len(whole) >= 0.8
    assert {torch.uint8, torch.float32} <= gathered


def test_two_ranks_time_their_gemms(folder: Path) -> None:
    two = load(folder, tensor_parallel_size=2, distributed_backend="gloo")
    chosen = [each.value for each in two.report.choices if each.what == "GEMM"]
    assert chosen
    assert chosen[0].startswith("skinny for")
    pairs = list(zip(tokens(two), tokens(load(folder)), strict=True))
    assert sum(a == b for a, b in pairs) / len(pairs) >= 0.8


@pytest.mark.parametrize("case", ["dense", "qwen3-moe", "gpt-oss", "granite-hybrid"])
def test_two_stages_on_one_gpu(folder: Path, case: str) -> None:
    """Every stage has its own graphs; hidden states go through host memory between them."""
    if case != "dense":
        (folder / "config.json").write_text(json.dumps(COMMON | CASES[case]))
    two = load(folder, pipeline_parallel_size=2, distributed_backend="gloo")
    one = load(folder)
    pairs = list(zip(tokens(two), tokens(one), strict=True))
    # Steps of other sizes round 16-bit values otherwise, and a recurrent state keeps the difference.
    least = 0.6 if case == "granite-hybrid" else 0.8
    assert sum(a == b for a, b in pairs) / len(pairs) >= least
    executors = two.engine.stats().executors
    assert executors["decode graph"] > 10
    assert executors["mixed graph"] > 0


def test_stages_of_several_ranks_on_one_gpu(folder: Path) -> None:
    parallel = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    four = load(folder, dtype="float32", distributed_backend="gloo", **parallel)
    assert tokens(four) == tokens(load(folder, dtype="float32"))


def test_stages_verify_draft_tokens(folder: Path) -> None:
    want = tokens(load(folder, dtype="float32", plain_kernels=True))
    two = load(
        folder,
        dtype="float32",
        plain_kernels=True,
        pipeline_parallel_size=2,
        distributed_backend="gloo",
        spec="ngram",
    )
    assert tokens(two) == want
    assert two.engine.stats().num_draft_tokens > 0


def test_more_ranks_than_gpus(folder: Path) -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"torch sees {count - 1}. Use at most {count - 1}"):
        load(folder, tensor_parallel_size=count)
