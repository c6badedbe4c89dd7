"""Finding a model's files: paths, hub ids, and errors."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import save_file

from tests.models.tiny import config, write_folder, write_gguf, write_json
from windlass.config import ModelConfig
from windlass.errors import CheckpointError, ConfigError, DownloadError, UnsupportedError
from windlass.folders import cache_dir
from windlass.models import hub
from windlass.models.hub import HubModel
from windlass.models.source import resolve


def found(model, **options):
    return resolve(ModelConfig(model=str(model), **options))


def test_a_folder_with_one_file(tmp_path):
    folder = write_folder(tmp_path / "Tiny-1", {"a": torch.ones(2)})
    files = found(folder)
    assert (files.name, files.kind, files.path) == ("Tiny-1", "folder", folder)
    assert files.weights == (folder / "model.safetensors",)
    assert found(folder, served_model_name=("mine",)).name == "mine"


def test_a_sharded_folder(tmp_path):
    write_json(tmp_path / "config.json", config())
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = write_json(tmp_path / "model.safetensors.index.json", {"weight_map": shards})
    for name, shard in shards.items():
        save_file({name: torch.ones(1)}, tmp_path / shard)
    files = found(tmp_path)
    assert [file.name for file in files.weights] == sorted(shards.values())
    assert files.index == index
    (tmp_path / shards["b"]).unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: model-00002-of-00002"):
        found(tmp_path)
    write_json(index, {})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        found(tmp_path)


def test_a_gguf_file_and_a_folder_around_it(tmp_path):
    path = write_gguf(tmp_path / "Tiny.Q8_0.gguf")
    for model in (path, tmp_path):
        files = found(model)
        assert (files.kind, files.path, files.weights) == ("gguf", path, (path,))
    assert found(path).name == "Tiny.Q8_0"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(Tiny\.Q8_0\.gguf, b\.gguf\)"):
        found(tmp_path)


def test_split_gguf_is_rejected(tmp_path):
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(b"GGUF")
    for model in (path, tmp_path):
        with pytest.raises(UnsupportedError, match="one of 3 parts of a split GGUF"):
            found(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pickle"])
def test_pickle_is_never_loaded(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for model in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedError, match="pickle is never loaded"):
            found(model)
    write_json(tmp_path / "config.json", config())
    with pytest.raises(UnsupportedError, match="to safetensors"):
        found(tmp_path)


def test_folders_without_a_model_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \.gguf file"):
        found(tmp_path)
    path = write_json(tmp_path / "config.json", config())
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        found(tmp_path)
    with pytest.raises(CheckpointError, match="is only a config"):
        found(path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"notes\.txt: is not a model"):
        found(tmp_path / "notes.txt")


def test_unfinished_model_is_reported(tmp_path):
    (tmp_path / "made.partial").mkdir()
    with pytest.raises(CheckpointError, match=r"made: does not exist; .*made\.partial is the"):
        found(tmp_path / "made")


def test_a_config_is_enough_for_dummy_weights(tmp_path):
    path = write_json(tmp_path / "config.json", config())
    for model in (tmp_path, path):
        files = found(model, load_format="dummy")
        assert (files.kind, files.path, files.weights) == ("folder", tmp_path, ())
        assert files.name == tmp_path.name


def test_mismatched_load_format_is_rejected(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="--load-format safetensors does not match"):
        found(path, load_format="safetensors")
    folder = write_folder(tmp_path / "f", {"a": torch.ones(1)})
    with pytest.raises(ConfigError, match="--load-format gguf does not match"):
        found(folder, load_format="gguf")


@pytest.mark.parametrize("model", ["nonsense", "no/such/folder", "./missing", "a b/c", "x.gguf"])
def test_invalid_model_names_are_rejected(model):
    with pytest.raises(CheckpointError, match=r"no such file or folder .* of the form"):
        found(model)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name-1.5B", HubModel("org/name-1.5B", None)),
        ("org/name:q4/M.gguf", HubModel("org/name", "q4/M.gguf")),
        ("org/name-GGUF:Q4_K_M", HubModel("org/name-GGUF", None, "Q4_K_M")),
        ("org/name/M.Q4_0.gguf", HubModel("org/name", "M.Q4_0.gguf")),
        ("org/M.gguf", None),
        ("/abs/path", None),
        ("name", None),
    ],
)
def test_hub_ids_are_recognised(text, model):
    assert hub.parse(text) == model


def test_a_hub_model_is_fetched_with_its_options(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "snapshot", {"a": torch.ones(1)})
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = found("org/name", revision="v2", hf_token="secret", download_dir=str(tmp_path))
    assert (files.name, files.path) == ("org/name", folder)
    assert (asked["repo"], asked["revision"], asked["token"]) == ("org/name", "v2", "secret")
    assert asked["cache_dir"] == str(tmp_path)
    assert "*.safetensors" in asked["allow_patterns"]
    found("org/name", load_format="dummy")
    assert "*.safetensors" not in asked["allow_patterns"]
    (folder / "config.json").unlink()
    with pytest.raises(DownloadError, match=r"choose one: org/name:FILE\.gguf"):
        found("org/name")


def test_one_file_of_a_hub_model(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "M.gguf")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    files = found("org/name:M.gguf")
    assert (files.name, files.kind, files.path) == ("M", "gguf", path)


GGUF_REPO = [
    *("README.md", "mmproj-Q8_0.gguf", "M-Q8_0.gguf", "M-Q4_K_M.gguf", "M-Q4_K_S.gguf"),
    *("UD/M-IQ2_M.gguf", "old/M.IQ2_M.gguf", "BF16/M-BF16-00001-of-00002.gguf"),
    "BF16/M-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize("quant", ["Q4_K_M", "q4_k_m"])
def test_a_quantisation_chooses_the_file(tmp_path, monkeypatch, quant):
    """As llama.cpp's -hf org/name:Q4_K_M."""
    (tmp_path / "M-Q4_K_M.gguf").touch()
    asked = []

    def download(repo, file, **_):
        asked.append((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: GGUF_REPO)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    files = found(f"org/name-GGUF:{quant}")
    assert asked == [("org/name-GGUF", "M-Q4_K_M.gguf")]
    assert (files.name, files.kind) == ("M-Q4_K_M", "gguf")


@pytest.mark.parametrize(
    ("quant", "error", "message"),
    [
        (
            "Q4_K",
            DownloadError,
            r"no GGUF file .* has Q4_K in its name; it has BF16/.*M-Q8_0\.gguf",
        ),
        ("IQ2_M", DownloadError, r"Choose one: org/name:UD/M-IQ2_M\.gguf, org/name:old/M"),
        ("BF16", UnsupportedError, "one of 2 parts of a split GGUF"),
    ],
)
def test_a_quantisation_without_one_file_is_rejected(monkeypatch, quant, error, message):
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: GGUF_REPO)
    with pytest.raises(error, match=message):
        found(f"org/name:{quant}")


def test_a_quantisation_is_found_in_the_cache_without_a_network(tmp_path, monkeypatch):
    (tmp_path / "M-Q8_0.gguf").touch()

    def offline(*_, **__):
        raise ConnectionError("no route")

    def cached(*_, local_files_only=False, **__):
        assert local_files_only
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda _, file, **__: str(tmp_path / file)
    )
    assert found("org/name:Q8_0").path == tmp_path / "M-Q8_0.gguf"
    (tmp_path / "M-Q8_0.gguf").unlink()
    with pytest.raises(DownloadError, match=r"org/name:Q8_0: the download failed.*no route"):
        found("org/name:Q8_0")


def http_error(kind):
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("said the hub", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: http_error(hub_errors.GatedRepoError), "access is gated"),
        (lambda: http_error(hub_errors.RepositoryNotFoundError), "no such repository"),
        (lambda: http_error(hub_errors.RevisionNotFoundError), "no revision 'v9'"),
        (lambda: http_error(hub_errors.RemoteEntryNotFoundError), "no such file"),
        (lambda: http_error(hub_errors.HfHubHTTPError), "the download failed"),
        (lambda: hub_errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (lambda: ConnectionError("reset"), "the download failed"),
    ],
)
def test_hub_errors_have_advice(monkeypatch, error, message):
    def fail(*_, **__):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match="hub model org/name: ") as caught:
        found("org/name", revision="v9")
    assert message in str(caught.value)


def test_the_cache_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("WINDLASS_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "windlass"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "windlass"
