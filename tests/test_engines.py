"""Several engines in one process: each has its own thread pool and modes, also with shared weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tests.lora.folders import write_adapter, write_model
from windlass import SamplingParams
from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.types import NewRequest
from windlass.engine import Engine
from windlass.errors import ConfigError
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.native.pool import Pool

_COMPILERS, _ = find_compilers()
needs_compiler = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")

PROMPTS = [[(7 * i + j) % 96 for j in range(1 + 5 * i)] for i in range(8)]
USUAL = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True, logprobs=0)
DETERMINISTIC = replace(USUAL, deterministic=True)

Outputs = dict[str, list[tuple[int, float]]]  # tokens and logprobs by request


@dataclass(frozen=True, slots=True)
class Job:
    """Requests for one engine."""

    engine: Engine
    params: SamplingParams
    adapter: str = ""

    def run(self) -> Outputs:
        for i, prompt in enumerate(PROMPTS):
            self.engine.add(NewRequest(str(i), prompt, self.params, adapter=self.adapter))
        outputs: Outputs = {str(i): [] for i in range(len(PROMPTS))}
        while self.engine.has_work:
            for output in self.engine.step():
                scores = [each.logprob for each in output.logprobs or ()]
                outputs[output.request_id] += zip(output.tokens, scores, strict=True)
        return outputs


def run_at_once(jobs: Sequence[Job]) -> list[Outputs]:
    """Run each job in its own thread, all at the same time."""
    together = Barrier(len(jobs))

    def run(job: Job) -> Outputs:
        together.wait()
        return job.run()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def build(model: Path, sharing: Built | None = None, **options: Any) -> Built:
    given = {"num_blocks": 100, "max_num_seqs": 8, "prefix_caching": False, "num_threads": 1}
    config = EngineConfig.of(
        model=str(model), load_format="dummy", device="cpu", **{**given, **options}
    )
    source = open_model(config).source
    return build_engine(config, source, None if sharing is None else sharing.weights)


def tokens_of(outputs: Outputs) -> list[list[int]]:
    return [[token for token, _ in each] for each in outputs.values()]


def assert_undisturbed(*jobs: Job) -> None:
    alone = [job.run() for job in jobs]
    for _ in range(3):
        assert run_at_once(jobs) == alone


@pytest.mark.parametrize("shared", [False, True], ids=["own weights", "shared weights"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        pytest.param({"quantization": "int4"}, marks=needs_compiler),
        pytest.param({"quantization": "int4", "enforce_eager": True}, marks=needs_compiler),
    ],
    ids=["torch", "program", "native eager"],
)
def test_engines_that_run_at_once_do_not_disturb_each_other(
    model: Path, options: dict[str, Any], shared: bool
) -> None:
    """One engine has deterministic requests; the other has another number of threads."""
    first = build(model, **options)
    second = build(model, first if shared else None, num_threads=2, **options)
    torch.set_num_threads(1)  # otherwise torch sums in another order in threads that are new to it
    assert_undisturbed(Job(first.engine, DETERMINISTIC), Job(second.engine, USUAL))


@pytest.mark.parametrize("spec", ["ngram", "self", "draft"])
def test_one_engine_speculates(model: Path, spec: str) -> None:
    """The draft model has its own network; an early exit uses the layers of its engine."""
    plain = build(model, quantization="int4")
    own = {"spec_model": str(model)} if spec == "draft" else {}
    speculating = build(model, plain, quantization="int4", spec=spec, num_threads=2, **own)
    jobs = [Job(plain.engine, DETERMINISTIC), Job(speculating.engine, USUAL)]
    alone = [tokens_of(job.run()) for job in jobs]
    assert [tokens_of(outputs) for outputs in run_at_once(jobs)] == alone


@needs_compiler
def test_an_engine_runs_while_another_is_built(model: Path) -> None:
    """Recording a program must not catch the steps of another engine."""
    first = build(model, quantization="int4")
    job = Job(first.engine, USUAL)
    alone = job.run()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(lambda: [job.run() for _ in range(10)])
        second = build(model, first, quantization="int4", num_threads=2)
        assert Job(second.engine, USUAL).run() == alone
        assert running.result() == [alone] * 10


@pytest.mark.parametrize("eager", [False, True], ids=["program", "eager"])
def test_engines_with_shared_weights_have_their_own_adapters(
    model: Path, tmp_path: Path, eager: bool
) -> None:
    def options(seed: int) -> dict[str, Any]:
        named = f"a={write_adapter(tmp_path / str(seed), seed=seed)}"
        return {"enable_lora": True, "lora_modules": [named], "max_lora_rank": 8}

    def generate(*built: Built) -> list[list[list[int]]]:
        return [tokens_of(each) for each in run_at_once([Job(b.engine, USUAL, "a") for b in built])]

    first = build(model, enforce_eager=eager, **options(1))
    other = options(2)
    alone = [*generate(first), *generate(build(model, enforce_eager=eager, **other))]
    assert alone[0] != alone[1]
    second = build(model, first, enforce_eager=eager, **other)
    assert generate(first, second) == alone


@needs_compiler
def test_any_number_of_threads_gives_the_same_tokens(model: Path) -> None:
    first, *others = (
        Job(build(model, quantization="int4", num_threads=count).engine, USUAL).run()
        for count in (1, 2, 3)
    )
    assert others == [first, first]


@needs_compiler
def test_an_engine_has_one_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model and the adapters use it as well."""
    counts: list[int] = []
    make = Pool.__init__

    def counted(self: Pool, native: Any, num_threads: int, *cpus: Any) -> None:
        counts.append(num_threads)
        make(self, native, num_threads, *cpus)

    monkeypatch.setattr(Pool, "__init__", counted)
    options = {"quantization": "int4", "enable_lora": True, "num_threads": 2}
    first = build(model, spec="draft", spec_model=str(model), **options)
    assert counts == [2]
    build(model, first, **{**options, "num_threads": 1})
    assert counts == [2, 1]


@needs_compiler
@pytest.mark.parametrize("spec", ["none", "draft"])
def test_a_pool_ends_with_its_engine(model: Path, spec: str) -> None:
    """Without waiting for the garbage collector, which ignores engines."""
    own = {"spec_model": str(model)} if spec == "draft" else {}
    built = build(model, spec=spec, num_threads=2, **own)
    Job(built.engine, USUAL).run()
    pool = weakref.ref(built.weights.parts.workers.pool)
    del built
    assert pool() is None


def test_weights_are_shared_without_a_copy(model: Path) -> None:
    first = build(model, quantization="int4")
    second = build(model, first, quantization="int4", max_model_len=64)
    pairs = zip(
        first.weights.network.parameters(), second.weights.network.parameters(), strict=True
    )
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert second.report.max_model_len == 64
    assert second.weights.weight_bytes == first.weights.weight_bytes


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"plain_kernels": True}, {}], ids=str)
def test_weights_of_another_kind_are_not_shared(model: Path, options: dict[str, Any]) -> None:
    first = build(model, quantization="int4")
    with pytest.raises(ConfigError, match="the weights to share were loaded with"):
        build(model, first, **options)
