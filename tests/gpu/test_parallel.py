"""Ranks on one GPU: NCCL with one rank, inside captured graphs, and two ranks through host memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_families import CASES, COMMON, GREEDY, PROMPTS, load, tokens
from windlass import LLM
from windlass.build import _build_rank, _finish, _Log, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.parallel.mesh import Mesh

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


def test_an_engine_with_collectives_in_its_graphs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All projections back into the residual stream are summed by NCCL, as those of a shard are."""
    options = {"model": str(folder), "load_format": "dummy", **SIZES}
    config = EngineConfig.of(**options)
    opened = open_model(config)
    want = tokens(load(folder))
    made = Linear.__init__

    def partial(self: Linear, *args: Any, **values: Any) -> None:
        made(self, *args, **values)
        self.is_partial = any(part.endswith(("o_proj", "down_proj")) for part in self.outputs)

    monkeypatch.setattr(Linear, "__init__", partial)
    log = _Log()
    rank = _build_rank(config, opened.source, log, mesh=Mesh(tp=nccl(tmp_path)))
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


def test_more_ranks_than_gpus(folder: Path) -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"torch sees {count - 1}. Use at most {count - 1}"):
        load(folder, tensor_parallel_size=count)
