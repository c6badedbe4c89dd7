"""The owners name all memory of an engine: compared with a walk over every object that it reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import write_adapter, write_model
from tests.runner.memory_walk import walk
from tests.runner.test_deterministic import CONFIG
from tests.runner.test_memory import held
from tests.speculative.test_heads import DIM, WIDE, eagle, medusa
from tests.test_engines import build
from windlass import LLM, SamplingParams
from windlass.core.types import NewRequest
from windlass.engine import Engine
from windlass.runner.memory import Storage, storages

# Every kind of state that a slot can have.
PARAMS = SamplingParams(
    max_tokens=30,
    seed=1,
    ignore_eos=True,
    min_tokens=2,
    repetition_penalty=1.3,
    logit_bias={3: 1.0},
    bad_token_ids=((4, 5), (6,)),
)


def assert_complete(engine: Engine) -> None:
    memory: Any = engine._memory
    named = {storage.address: storage.num_bytes for _, storage in storages(memory._owners)}
    walked: dict[int, tuple[str, int]] = {}
    for path, tensor in walk(engine):
        storage = Storage(tensor)
        if storage.num_bytes and not tensor.is_meta:
            walked[storage.address] = path, storage.num_bytes
    assert not [path for address, (path, _) in walked.items() if address not in named]
    assert sum(named.values()) == sum(num_bytes for _, num_bytes in walked.values())


def run(engine: Engine, adapters: Sequence[str] = ("",)) -> None:
    """Run a few steps of requests that do not end, so that the slots have their state."""
    for i, adapter in enumerate(adapters):
        engine.add(NewRequest(str(i), [1, 2, 3, 4 + i], PARAMS, adapter=adapter))
    while engine.stats().num_running != len(adapters):
        engine.step()
    for _ in range(3):
        engine.step()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


ENGINES: dict[str, dict[str, Any]] = {
    "program": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
    "reference": {"dtype": "float32"},
    "plain kernels": {"quantization": "fp8", "plain_kernels": True},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "KV offload": {"kv_offload_gb": 0.01, "prefix_caching": True},
    "n-gram": {"spec": "ngram"},
    "early exit": {"spec": "self", "spec_exit_layer": 1},
}


@pytest.mark.parametrize("name", ENGINES)
def test_all_memory_has_an_owner(model: Path, name: str) -> None:
    engine = build(model, **ENGINES[name]).engine
    assert_complete(engine)
    run(engine)
    assert_complete(engine)


@pytest.mark.parametrize("options", [{}, {"lora_dtype": "int8"}, {"enforce_eager": True}], ids=str)
def test_adapters_and_a_draft_model(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    listed = [f"a{seed}={write_adapter(tmp_path / str(seed), seed=seed)}" for seed in (1, 2)]
    lora = {"enable_lora": True, "lora_modules": listed, "max_lora_rank": 8}
    spec = {"spec": "draft", "spec_model": str(model)}
    engine = build(model, quantization="int4", **lora, **spec, **options).engine
    assert_complete(engine)
    run(engine, ["a1", "a2", ""])
    assert_complete(engine)
    found = engine.memory().held
    assert found is not None
    assert found.parts.keys() >= {"weights", "KV cache", "adapters", "tables"}


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(CONFIG | {"head_dim": DIM, "intermediate_size": WIDE})
    )
    head = {"medusa": medusa, "eagle": eagle}[kind](tmp_path / kind)
    options = {"num_blocks": 50, "max_num_seqs": 4, "quantization": "int4"}
    make = partial(LLM, str(path), load_format="dummy", device="cpu", **options)
    plain, speculating = make(), make(spec=kind, spec_model=str(head))
    run(speculating.engine)
    assert_complete(speculating.engine)
    more = {
        name: part.num_bytes - held(plain).parts[name].num_bytes
        for name, part in held(speculating).parts.items()
    }
    assert more["weights"] > 3 * CONFIG["hidden_size"] ** 2  # sleep must restore them
    assert (more["KV cache"] > 0) == (kind == "eagle")
