"""Adapters in the offline API: a real engine on a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.lora.folders import lora_tensors, write_adapter, write_model
from windlass import LLM, AsyncLLM, SamplingParams
from windlass.errors import AdapterConflict, AdapterNotFound, CheckpointError, ConfigError

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def make(model: Path, **options: Any) -> LLM:
    options = {"num_blocks": 400, "max_num_seqs": 24, "enable_lora": True, **options}
    return LLM(str(model), load_format="dummy", device="cpu", dtype="float32", **options)


def tokens(
    llm: LLM, prompts: Any, adapter: Any = "", params: SamplingParams = GREEDY
) -> list[list[int]]:
    return [r.outputs[0].token_ids for r in llm.generate(prompts, params, adapter=adapter)]


def test_two_hundred_adapters_in_sixteen_slots(model: Path, tmp_path: Path) -> None:
    random = Random(3)
    names = [f"tenant-{i}" for i in range(200)]
    for seed, name in enumerate(names):
        rank, targets = (
            random.choice([1, 2, 4, 8]),
            random.choice([["q_proj", "v_proj"], ["o_proj", "up_proj"]]),
        )
        write_adapter(tmp_path / name, rank, seed, targets, use_rslora=True)
    listed = [f"{name}={tmp_path / name}" for name in names]
    prompts = [[random.randrange(96) for _ in range(random.randint(3, 20))] for _ in names]
    wanted = random.sample(names, len(names))
    many = make(model, lora_modules=listed, max_loras=16, max_cpu_loras=20, max_lora_rank=8)
    few = replace(GREEDY, max_tokens=3)
    together = tokens(many, prompts, wanted, few)
    alone = make(model, lora_modules=listed, max_loras=1, max_lora_rank=8)
    for prompt, name, found in zip(prompts, wanted, together, strict=True):
        assert tokens(alone, [prompt], name, few) == [found], name
    base = tokens(alone, prompts, "", few)
    assert sum(a != b for a, b in zip(base, together, strict=True)) > 100
    stats = many.engine.stats().adapters
    assert stats is not None
    assert (stats.num_resident, stats.num_loaded, stats.num_waiting) == (16, 200, 0)
    assert stats.num_in_memory <= 20


def test_adapters_can_be_added_and_removed(model: Path, tmp_path: Path) -> None:
    llm = make(model, max_loras=2, max_lora_rank=8)
    prompt = [[1, 2, 3, 4]]
    base = tokens(llm, prompt)
    llm.add_adapter("a", str(write_adapter(tmp_path / "a", seed=1)))
    changed = tokens(llm, prompt, "a")
    assert changed != base == tokens(llm, prompt)
    with pytest.raises(AdapterConflict, match="'a' is already loaded"):
        llm.add_adapter("a", str(tmp_path / "a"))
    with pytest.raises(CheckpointError, match="rank 16, above the engine's maximum of 8"):
        llm.add_adapter("b", str(write_adapter(tmp_path / "b", rank=16)))
    with pytest.raises(CheckpointError, match="was not found"):
        llm.add_adapter("c", str(tmp_path / "nowhere"))
    llm.remove_adapter("a")
    with pytest.raises(AdapterNotFound):
        tokens(llm, prompt, "a")
    # A new adapter under the same name must reuse neither weights nor cached blocks.
    llm.add_adapter("a", str(write_adapter(tmp_path / "other", seed=2)))
    again = tokens(llm, prompt, "a")
    assert again != changed
    llm.add_adapter("same", str(tmp_path / "other"))
    assert tokens(llm, prompt, "same") == again


def test_broken_adapter_fails_only_its_request(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    llm = make(model, lora_modules=[f"a={folder}"], max_lora_rank=8)
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(Exception, match=r"adapter 'a' could not be loaded"):
        tokens(llm, [[1, 2]], "a")
    assert len(tokens(llm, [[1, 2]])[0]) == 5
    assert not llm.engine.has_work


def test_lm_head_adapter_with_speculation(model: Path, tmp_path: Path) -> None:
    tensors = lora_tensors(targets=["lm_head", "down_proj"])
    folder = write_adapter(tmp_path / "a", targets=["lm_head", "down_proj"], tensors=tensors)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9]]
    options = {"lora_modules": [f"a={folder}"], "max_lora_rank": 8}
    plain = tokens(make(model, **options), prompts, ["a", ""])
    assert tokens(make(model, spec="ngram", **options), prompts, ["a", ""]) == plain


def test_restarted_engine_reloads_its_adapters(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", seed=5)

    async def main() -> None:
        options = {"num_blocks": 50, "enable_lora": True, "max_lora_rank": 8}
        common = {"load_format": "dummy", "device": "cpu", "dtype": "float32"}
        async with AsyncLLM(str(model), **common, **options) as llm:
            base = (await llm.generate([1, 2, 3], GREEDY)).outputs[0].token_ids
            with pytest.raises(CheckpointError, match="was not found"):
                await llm.add_adapter("a", str(tmp_path / "nowhere"))
            await llm.add_adapter("a", str(folder))
            before = (await llm.generate([1, 2, 3], GREEDY, "a")).outputs[0].token_ids
            assert before != base
            pid = llm._client.replicas[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while llm._client.replicas[0].pid in (pid, None):
                await asyncio.sleep(0.05)
            after = (await llm.generate([1, 2, 3], GREEDY, "a")).outputs[0].token_ids
            assert after == before
            await llm.remove_adapter("a")
            with pytest.raises(AdapterNotFound):
                await llm.generate([1, 2, 3], GREEDY, "a")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": False, "max_loras": 2}, "--max-loras does nothing without --enable-lora"),
        ({"max_lora_rank": 512}, "at most 256"),
        ({"lora_dtype": "fp4"}, "--lora-dtype must be one of auto, int8; got 'fp4'"),
        ({"max_loras": 8, "max_cpu_loras": 2}, "--max-cpu-loras"),
        ({"lora_modules": ["a"]}, "NAME=FOLDER"),
        ({"lora_modules": ["a=x", "a=y"]}, "twice"),
        ({"lora_modules": [" =x"]}, "is not a valid adapter name"),
        ({"lora_modules": ["a=/no/such/folder"]}, "was not found"),
        ({"max_loras": 10**9, "max_lora_rank": 256}, "GiB are free.*--lora-dtype int8"),
    ],
)
def test_invalid_options_are_rejected(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        make(model, **options)
