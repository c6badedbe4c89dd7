"""The step contract is closed: plans and results are plain values, also between two processes."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.lora.folders import write_adapter, write_model
from tests.speculative import test_heads
from tests.speculative.test_speculation import PROMPTS, folder, make, small, verify_all
from windlass import LLM, SamplingParams
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.types import NewRequest, Output, StepPlan, StepResult

__all__ = ["folder", "small", "verify_all"]

COUNT = 12
SAMPLING = [
    SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=3, top_k=20, logprobs=2),
    SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=COUNT, seed=5, structured_outputs={"regex": "[a-p ,]*"}),
    SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=6, deterministic=True),
    SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1),
]


def serve_plans(connection: Connection) -> None:
    """Build the engine of each config and compute the plans after it until an empty message arrives."""
    while message := connection.recv_bytes():
        received = pickle.loads(message)
        if isinstance(received, EngineConfig):
            engine = build_engine(received, open_model(received).source).engine
            connection.send_bytes(b"ready")
            continue
        for _, name in received.adapters:  # the store of this process reads it, too
            while not engine.adapters._shelf.ready(name):
                time.sleep(0.001)
        connection.send_bytes(pickle.dumps(engine._runner.run(received)))


class RemoteRunner:
    """A runner in another process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(self, plan: StepPlan) -> StepResult:
        self._connection.send_bytes(pickle.dumps(plan))
        result: StepResult = pickle.loads(self._connection.recv_bytes())
        return result


Remote = Callable[[EngineConfig], RemoteRunner]


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    """Start the runner of a config in another process, where it replaces the last one."""
    own, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve_plans, args=(other,), daemon=True)
    process.start()
    other.close()

    def start(config: EngineConfig) -> RemoteRunner:
        own.send_bytes(pickle.dumps(config))
        assert own.recv_bytes() == b"ready"
        return RemoteRunner(own)

    try:
        yield start
        own.send_bytes(b"")
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def generate(llm: LLM, params: list[SamplingParams], adapters: list[str] | str = "") -> list[Any]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, adapter=adapters)]
    return [(each.token_ids, each.finish_reason, each.logprobs) for each in outputs]


def options_of(method: str, small: Path, heads: Path) -> dict[str, Any]:
    if method == "plain":
        return {}
    options: dict[str, Any] = {"spec": method}
    if method == "draft":
        options |= {"spec_model": str(small), "spec_quantization": "int8"}
    if method == "self":
        options |= {"spec_exit_layer": 1}
    if method in ("medusa", "eagle"):
        options |= {"spec_model": str(getattr(test_heads, method)(heads / method))}
    return options


@pytest.fixture(scope="module")
def want(folder: Path) -> list[Any]:
    return generate(make(folder, quantization=None), SAMPLING)


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize(
    "method", ["plain", "ngram", "lookahead", "draft", "self", "medusa", "eagle"]
)
def test_a_runner_in_another_process_gives_the_same_tokens(
    method: str, folder: Path, small: Path, tmp_path: Path, remote: Remote, want: list[Any]
) -> None:
    """For every proposer, with grammars, log probabilities and deterministic requests."""
    options = options_of(method, small, tmp_path)
    llm = make(folder, quantization=None, **options)
    options = {"num_blocks": 200, "max_num_seqs": 16, **options}
    config = EngineConfig.of(model=str(folder), load_format="dummy", device="cpu", **options)
    llm.engine._runner = remote(config)
    got = generate(llm, SAMPLING)
    assert [each[:2] for each in got] == [each[:2] for each in want]
    assert (llm.engine.stats().num_draft_tokens > 0) == (method != "plain")


def test_adapters_in_another_process(tmp_path: Path, remote: Remote) -> None:
    model = write_model(tmp_path / "model")
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, 4, seed, ["q_proj", "v_proj"])
    options: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 100,
        "enable_lora": True,
        "max_loras": 1,
        "lora_modules": [f"{name}={tmp_path / name}" for name in "ab"],
    }
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts, names = [[1, 2, 3]] * 3, ["", "a", "b"]
    llm = LLM(str(model), **options)
    want = [each.outputs[0].token_ids for each in llm.generate(prompts, params, adapter=names)]
    assert len({tuple(tokens) for tokens in want}) > 1
    other = LLM(str(model), **options)
    other.engine._runner = remote(EngineConfig.of(model=str(model), **options))
    got = [each.outputs[0].token_ids for each in other.generate(prompts, params, adapter=names)]
    assert got == want


class PicklingRunner:
    """Passes every plan and every result through pickle."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_bytes = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(self._copy(plan))
        return self._copy(result)

    def _copy(self, value: Any) -> Any:
        pickled = pickle.dumps(value)
        self.num_bytes += len(pickled)
        copy = pickle.loads(pickled)
        assert copy == value
        return copy


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 5, "logprobs": 1},
    {"frequency_penalty": 0.5},
    {"prompt_logprobs": 0},
    {"stop_token_ids": tuple(range(0, 500, 90))},
    {"structured_outputs": {"choice": ["red", "green"]}, "ignore_eos": False},
]


def random_requests(rng: Random) -> list[NewRequest]:
    found = []
    for i in range(14):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 30))]
        count = rng.randint(20, 40)
        params: dict[str, Any] = {"max_tokens": count, "seed": i, "ignore_eos": True}
        params |= KINDS[i % len(KINDS)]
        found.append(NewRequest(f"r{i}", prompt, SamplingParams(**params), priority=i % 3))
    return found


def run_randomly(llm: LLM, seed: int) -> dict[str, list[int]]:
    """Add and abort requests at random; returns the tokens of the others."""
    rng, engine = Random(seed), llm.engine
    requests = random_requests(rng)
    aborted = {each.request_id for each in rng.sample(requests, 4)}
    got: dict[str, list[int]] = {each.request_id: [] for each in requests}

    def take(outputs: list[Output]) -> None:
        for output in outputs:
            assert output.error is None
            got[output.request_id] += output.tokens

    for request in requests:
        engine.add(request)
        for _ in range(rng.randint(0, 2)):
            take(engine.step())
        if request.request_id in aborted:
            engine.abort(request.request_id)
    while engine.has_work:
        take(engine.step())
    return {name: tokens for name, tokens in got.items() if name not in aborted}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("method", ["plain", "ngram", "draft", "tier"])
def test_pickled_plans_and_results_give_the_same_tokens(
    method: str, folder: Path, small: Path, tmp_path: Path
) -> None:
    """A random workload with preemptions and aborts."""
    bounds = {"num_blocks": 40, "block_size": 4, "max_model_len": 160, "max_num_seqs": 6}
    want = run_randomly(make(folder, **bounds), seed=1)
    tier = {"kv_offload_gb": 0.01} if method == "tier" else {}
    own = tier or options_of(method, small, tmp_path)
    llm = make(folder, **bounds, **own)
    runner = llm.engine._runner = PicklingRunner(llm.engine._runner)
    assert run_randomly(llm, seed=1) == want
    assert llm.engine.stats().num_preemptions > 0
    assert runner.num_bytes > 0
    assert all(stats.num_loads > 0 for stats in llm.engine.stats().tiers)
    assert len(llm.engine.stats().tiers) == len(tier)
