"""A sleeping engine frees its memory, and generates the same text after waking."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from windlass import LLM, SamplingParams
from windlass.core.card import MemoryReport
from windlass.errors import EngineError
from windlass.kernels.storages import MemoryKind
from windlass.kernels.storages import held as held_tensors
from windlass.runner.memory import RunnerMemory, Storage, storages

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["A windlass is", "The capital of France is " * 30]
MIB = 2**20


def held(llm: LLM) -> MemoryReport:
    found = llm.engine.memory().held
    assert found is not None
    return found


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("default", num_blocks=1024, max_num_seqs=4, max_num_batched_tokens=256)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is freed with Linux's madvise")
def test_sleep_frees_memory_and_keeps_outputs(llm: LLM) -> None:
    before = [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY)]
    awake = held(llm)
    weights = awake.parts["weights"]
    assert weights.resident is not None
    assert weights.num_bytes > 90 * MIB
    assert weights.resident > 0.95 * weights.num_bytes
    llm.engine.sleep()
    asleep = held(llm)
    for name in asleep.parts.keys() - {"tables"}:
        part = asleep.parts[name]
        assert part.resident is not None
        assert part.resident < 0.2 * part.num_bytes, name
    # Weights, and the touched pages of the KV cache and the workspace.
    assert awake.total - asleep.total > 90 * MIB
    with pytest.raises(EngineError, match="asleep"):
        llm.generate(PROMPTS, GREEDY)
    llm.engine.wake()
    again = [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY)]
    assert again == before
    assert held(llm).total < awake.total + 16 * MIB


def test_the_memory_report_names_owners(llm: LLM) -> None:
    memory = llm.engine.memory()
    found = held(llm)
    capacity = llm.report.capacity
    assert found.parts["KV cache"].num_bytes == capacity.num_blocks * capacity.bytes_per_block
    # Position tables count as weights here.
    weights = llm.report.memory["weights"]
    assert weights <= found.parts["weights"].num_bytes < 1.05 * weights
    use = memory.blocks
    assert use.num_used + use.num_cached + use.num_free == capacity.num_blocks
    assert 0 < found.unaccounted < found.total


def test_a_running_engine_refuses_to_sleep(llm: LLM) -> None:
    stream = llm.stream_chat([{"role": "user", "content": "Hi"}], GREEDY)
    next(stream)
    with pytest.raises(EngineError, match="running"):
        llm.engine.sleep()
    stream.close()


def test_a_full_disk_leaves_the_engine_awake(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [result.outputs[0].text for result in llm.generate(PROMPTS[:1], GREEDY)]
    monkeypatch.setenv("WINDLASS_CACHE", "/proc/nothing/here")
    with pytest.raises(EngineError, match="cannot create"):
        llm.engine.sleep()
    assert [result.outputs[0].text for result in llm.generate(PROMPTS[:1], GREEDY)] == before


def test_shared_storages_are_counted_once() -> None:
    tensor = torch.arange(10_000)

    class Owner:
        def __init__(self, kind: MemoryKind, *tensors: Tensor | None) -> None:
            self.storages = partial(held_tensors, kind, *tensors)

    owners = [Owner("weights", tensor, tensor[5:], None), Owner("tables", tensor.view(100, 100))]
    found = list(storages(owners))
    assert [(name, storage.num_bytes) for name, storage in found] == [("weights", 80_000)]
    storage = Storage(tensor)
    first, length = storage.pages()
    assert first >= tensor.data_ptr()
    assert first + length <= tensor.data_ptr() + tensor.nbytes
    assert storage.lies_in([(0, 8), (first, first + length)])
    assert not storage.lies_in([(first - 4096, first + 8), (first + length, first + length + 8)])
    assert not storage.lies_in([])


def test_unsupported_devices_are_named() -> None:
    with pytest.raises(EngineError, match="captured steps hold its addresses"):
        RunnerMemory((), torch.device("cuda"), {}).sleep()


def test_results_have_an_explanation_and_a_cost(llm: LLM) -> None:
    llm._price = 3600.0
    stop = SamplingParams(max_tokens=30, temperature=0.0, stop=["e"])
    first, second = llm.generate(PROMPTS, [GREEDY, stop])
    for result in (first, second):
        (trace,) = result.traces
        assert result.cost == pytest.approx(trace.prefill_s + trace.decode_s)
        assert result.cost > 0
    assert first.traces[0].finish == "length"
    (explanation,) = llm.explain(first)
    assert explanation["dominated_by"] in ("prefill", "decode", "step")
    assert " of " in explanation["sentence"]
    assert explanation["seconds"]["server"] == 0
    assert explanation["seconds"]["total"] == pytest.approx(
        sum(value for name, value in explanation["seconds"].items() if name != "total"), abs=1e-5
    )
