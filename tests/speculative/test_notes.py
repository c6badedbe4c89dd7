"""Costs are kept of a head or a draft model by what decides them, not by where it lies."""

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
from tests.speculative.test_choosing import SOME
from tests.speculative.test_heads import DIM, WIDE, eagle, make, medusa
from tests.speculative.test_speculators import speculators
from windlass.config import EngineConfig
from windlass.models.card import load_hparams
from windlass.models.source import resolve
from windlass.speculative import start
from windlass.speculative.notes import notes_for
from windlass.speculative.registry import outline


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with files, which nobody reads."""
    path = tmp_path / "model"
    path.mkdir()
    sizes = {"head_dim": DIM, "intermediate_size": WIDE}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    save_file({"x": torch.zeros(1)}, path / "model.safetensors")
    return path


Place = Callable[..., str]


@pytest.fixture
def place(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    """Where notes are kept with these settings."""
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))

    def found(**options: Any) -> str:
        config = EngineConfig.of(model=str(model), **options)
        files = resolve(config.model)
        spec = load_hparams(files, config.model)
        device = torch.device("cpu")
        notes = notes_for(config, files, spec, device, "speculation", outline(config, spec))
        return str(notes._path)

    return found


def changed(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_head_is_known_by_its_shapes(tmp_path: Path, place: Place, kind: str) -> None:
    write = {"medusa": medusa, "eagle": eagle}[kind]
    folder = write(tmp_path / "a", 100)
    first = place(spec=kind, spec_model=str(folder))
    shutil.copytree(folder, tmp_path / "b")
    assert place(spec=kind, spec_model=str(tmp_path / "b")) == first
    trained = load_file(folder / "model.safetensors")
    save_file({name: one + 1 for name, one in trained.items()}, folder / "model.safetensors")
    changed(folder, windlass={"target": "another training"})
    assert place(spec=kind, spec_model=str(folder)) == first, "other numbers cost the same"
    shutil.rmtree(folder)
    write(folder, 50)
    assert place(spec=kind, spec_model=str(folder)) != first
    assert place(spec=kind, spec_model=str(tmp_path / "b"), spec_tokens=2) != first


def test_how_a_head_is_used_counts_too(tmp_path: Path, place: Place) -> None:
    folder = eagle(tmp_path / "head")
    first = place(spec="eagle", spec_model=str(folder))
    both = speculators(tmp_path / "both", folder)
    assert place(spec="eagle", spec_model=str(both)) == first, "the layout is no part of it"
    changed(folder, num_attention_heads=CONFIG["num_attention_heads"] // 2, head_dim=2 * DIM)
    assert place(spec="eagle", spec_model=str(folder)) != first
    changed(both, norm_output=True)
    assert place(spec="eagle", spec_model=str(both)) != first


def test_a_draft_model_is_known_by_its_network(tmp_path: Path, model: Path, place: Place) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(model, folder)
    options = {"spec": "draft", "spec_model": str(folder)}
    first = place(**options)
    shutil.copytree(folder, tmp_path / "copy")
    assert place(spec="draft", spec_model=str(tmp_path / "copy")) == first
    changed(folder, num_hidden_layers=1)
    fewer = place(**options)
    save_file({"x": torch.zeros(1).half()}, folder / "model.safetensors")
    assert len({first, fewer, place(**options)}) == 3


def test_a_start_notes_what_guesses(tmp_path: Path, model: Path, monkeypatch) -> None:
    """The engine asks for notes with the head's outline."""
    asked = []
    monkeypatch.setattr(start, "measure", lambda *_: SOME)
    noted = start.notes_for
    monkeypatch.setattr(start, "notes_for", lambda *of: asked.append(of[-1]) or noted(*of))
    for name in ("a", "b"):
        make(model, spec="eagle", spec_model=str(eagle(tmp_path / name)))
    make(model, spec="ngram")
    assert asked[0] == asked[1]
    assert asked[0]
    assert asked[2] is None
