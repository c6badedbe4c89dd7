"""Where an adapter lies: a folder, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from windlass.config import ModelConfig
from windlass.errors import CheckpointError, DownloadError
from windlass.lora.places import locate


def test_a_folder_is_found_and_its_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert locate(str(tmp_path / "link"), ModelConfig()) == tmp_path / "real"


def test_a_hub_id_is_fetched_without_the_models_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config = ModelConfig(revision="v2", hf_token="secret")
    assert locate("org/adapter", config) == tmp_path
    assert (asked["repo"], asked["revision"], asked["token"]) == ("org/adapter", None, "secret")
    assert asked["allow_patterns"] == ["adapter_*"]


def test_what_cannot_be_fetched_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(DownloadError, match="org/adapter: the disk is full"):
        locate("org/adapter", ModelConfig())


def test_anything_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="was not found"):
        locate("no such/adapter/anywhere", ModelConfig())
