"""Runners of pipeline stages, as threads: recorded programs, formats, adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import lora_tensors, write_adapter, write_model
from tests.parallel.stages import staged
from tests.parallel.test_tensor_parallel import CONFIG, PROMPTS
from tests.speculative import test_heads, test_mtp
from tests.speculative.test_speculation import model_in, small, verify_all
from tests.steps import generate
from windlass.build import Built, build_engine, open_model
from windlass.build_rank import Source
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.models.card import load_hparams
from windlass.models.source import resolve

__all__ = ["small", "verify_all"]

OPTIONS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "eager": {"enforce_eager": True},
    "int8": {"quantization": "int8"},
    "float32": {"dtype": "float32"},
}


def run(built: Built, prompts: list[list[int]], adapter: str = "") -> list[list[int]]:
    """The tokens of greedy requests."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return generate(built.engine, prompts, params, adapter)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    changes = {"num_hidden_layers": 4, "tie_word_embeddings": request.param}
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


def config_of(folder: Path, stages: int, **options: Any) -> EngineConfig:
    given = {"load_format": "dummy", "num_blocks": 64, "max_num_batched_tokens": 32}
    return EngineConfig.of(
        model=str(folder), device="cpu", pipeline_parallel_size=stages, **(given | options)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_stages_give_the_tokens_of_the_whole_network(name: str, folder: Path) -> None:
    whole = config_of(folder, 1, **OPTIONS[name])
    want = run(build_engine(whole, open_model(whole).source), PROMPTS)
    with staged(config_of(folder, 3, **OPTIONS[name]), 3) as (built, runners):
        assert run(built, PROMPTS) == want
        used = "program" if name in ("recorded", "int8") else "eager"
        assert [runner.executors[0].name for runner in runners] == [used] * 3
        assert built.engine.stats().executors.keys() == {used}


@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("method", ["ngram", "draft", "medusa", "eagle"])
def test_proposers_do_not_change_the_tokens(
    method: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    model_in(path, num_hidden_layers=4)
    whole = config_of(path, 1)
    want = run(build_engine(whole, open_model(whole).source), PROMPTS)
    options: dict[str, Any] = {"spec": method}
    if method == "draft":
        options |= {"spec_model": str(request.getfixturevalue("small"))}
    if method in ("medusa", "eagle"):
        options |= {"spec_model": str(getattr(test_heads, method)(tmp_path / method))}
    with staged(config_of(path, 3, **options), 3) as (built, _):
        assert run(built, PROMPTS) == want
        assert built.engine.stats().num_draft_tokens > 0


@pytest.mark.usefixtures("verify_all")
def test_the_mtp_layer_drafts_on_the_last_stage(tmp_path: Path) -> None:
    test_mtp.save(next(iter(test_mtp.CASES)), tmp_path)
    given: dict[str, Any] = {"load_format": "auto", "dtype": "float32", "num_blocks": 200}
    whole, drafting = config_of(tmp_path, 1, **given), config_of(tmp_path, 2, spec="mtp", **given)
    files = resolve(whole.model)
    source = Source(files, load_hparams(files, whole.model), ())
    prompts = [[5, 9, 22, 7, 3], [8] * 40]
    want = run(build_engine(whole, source), prompts)
    with staged(drafting, 2, source) as (built, _):
        assert run(built, prompts) == want
        assert built.engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("layers", [None, [0]], ids=["all layers", "the first layer"])
def test_adapters_change_the_layers_of_every_stage(
    layers: list[int] | None, tmp_path: Path
) -> None:
    model, tensors = write_model(tmp_path / "model"), lora_tensors()
    if layers is not None:
        tensors = {name: each for name, each in tensors.items() if ".layers.0." in name}
    adapter = write_adapter(tmp_path / "a", tensors=tensors, layers_to_transform=layers)
    options: dict[str, Any] = {"enable_lora": True, "lora_modules": (f"a={adapter}",)}
    whole = config_of(model, 1, **options)
    prompts = [[5, 9, 22, 7, 3], [8] * 40]
    alone = build_engine(whole, open_model(whole).source)
    want = [run(alone, prompts, name) for name in ("", "a")]
    assert want[0] != want[1]
    with staged(config_of(model, 2, **options), 2) as (built, _):
        assert [run(built, prompts, name) for name in ("", "a")] == want
