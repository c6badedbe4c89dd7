"""Locating an adapter: a folder, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from windlass.config import ModelConfig
from windlass.errors import CheckpointError, DownloadError
from windlass.lora.locate import locate


def test_folder_links_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert locate(str(tmp_path / "link"), ModelConfig()) == tmp_path / "real"


def test_hub_id_is_downloaded_without_the_models_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        calls.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config = ModelConfig(revision="v2", hf_token="secret")
    assert locate("org/adapter", config) == tmp_path
    assert (calls["repo"], calls["revision"], calls["token"]) == ("org/adapter", None, "secret")
    assert calls["allow_patterns"] == ["adapter_*"]


def test_download_errors_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(DownloadError, match="org/adapter: the disk is full"):
        locate("org/adapter", ModelConfig())


def test_other_locations_are_rejected() -> None:
    with pytest.raises(CheckpointError, match="was not found"):
        locate("no such/adapter/anywhere", ModelConfig())
