"""Cached costs are keyed by what decides the speed of a head or draft model, not by its path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.runner.test_deterministic import CONFIG
from tests.speculative.test_heads import DIM, WIDE, eagle, make, medusa
from tests.speculative.test_setup import SOME
from tests.speculative.test_speculators import speculators
from windlass.config import EngineConfig
from windlass.models.card import load_hparams
from windlass.models.source import resolve
from windlass.speculative import setup
from windlass.speculative.measurement_cache import open_measurement_cache
from windlass.speculative.registry import cost_key


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder whose weights are not read."""
    path = tmp_path / "model"
    path.mkdir()
    sizes = {"head_dim": DIM, "intermediate_size": WIDE}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    return path


CachePath = Callable[..., str]


@pytest.fixture
def cache_path(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CachePath:
    """The path of the measurement cache with these options."""
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))

    def found(**options: Any) -> str:
        config = EngineConfig.of(model=str(model), **options)
        files = resolve(config.model)
        hparams = load_hparams(files, config.model)
        cache = open_measurement_cache(
            config, files, hparams, torch.device("cpu"), proposer=cost_key(config, hparams)
        )
        return str(cache._path)

    return found


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_is_keyed_by_its_shapes(tmp_path: Path, cache_path: CachePath, kind: str) -> None:
    write = {"medusa": medusa, "eagle": eagle}[kind]
    folder = write(tmp_path / "a", 100)
    first = cache_path(spec=kind, spec_model=str(folder))
    shutil.copytree(folder, tmp_path / "b")
    assert cache_path(spec=kind, spec_model=str(tmp_path / "b")) == first
    trained = load_file(folder / "model.safetensors")
    save_file({name: one + 1 for name, one in trained.items()}, folder / "model.safetensors")
    change_config(folder, windlass={"target": "another training"})
    assert cache_path(spec=kind, spec_model=str(folder)) == first, "weights do not change the cost"
    shutil.rmtree(folder)
    write(folder, 50)
    assert cache_path(spec=kind, spec_model=str(folder)) != first
    assert cache_path(spec=kind, spec_model=str(tmp_path / "b"), spec_tokens=2) != first


def test_a_head_is_keyed_by_its_config(tmp_path: Path, cache_path: CachePath) -> None:
    folder = eagle(tmp_path / "head")
    first = cache_path(spec="eagle", spec_model=str(folder))
    both = speculators(tmp_path / "both", folder)
    assert cache_path(spec="eagle", spec_model=str(both)) == first, (
        "the file layout is no part of the key"
    )
    change_config(folder, num_attention_heads=CONFIG["num_attention_heads"] // 2, head_dim=2 * DIM)
    assert cache_path(spec="eagle", spec_model=str(folder)) != first
    change_config(both, norm_output=True)
    assert cache_path(spec="eagle", spec_model=str(both)) != first


def test_a_draft_model_is_keyed_by_its_network(
    tmp_path: Path, model: Path, cache_path: CachePath
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(model, folder)
    options = {"spec": "draft", "spec_model": str(folder)}
    first = cache_path(**options)
    shutil.copytree(folder, tmp_path / "copy")
    assert cache_path(spec="draft", spec_model=str(tmp_path / "copy")) == first
    change_config(folder, num_hidden_layers=1)
    fewer = cache_path(**options)
    save_file({"x": torch.zeros(1).half()}, folder / "model.safetensors")
    assert len({first, fewer, cache_path(**options)}) == 3


def test_the_engine_keys_its_cache_by_the_head(tmp_path: Path, model: Path, monkeypatch) -> None:
    keys = []
    monkeypatch.setattr(setup, "measure", lambda *_: SOME)
    open_cache = setup.open_measurement_cache

    def recorded(*args: Any, proposer: object, **options: Any) -> Any:
        keys.append(proposer)
        return open_cache(*args, proposer=proposer, **options)

    monkeypatch.setattr(setup, "open_measurement_cache", recorded)
    for name in ("a", "b"):
        make(model, spec="eagle", spec_model=str(eagle(tmp_path / name)))
    make(model, spec="ngram")
    assert keys[0] == keys[1]
    assert keys[0]
    assert keys[2] is None
