"""Downloads models from the Hugging Face hub. Every failure becomes a DownloadError with advice."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.config import ModelConfig
from windlass.errors import DownloadError

_PART = r"[A-Za-z0-9][\w.-]*"
_REPO = re.compile(rf"({_PART}/{_PART})")
_REPO_FILE = re.compile(rf"({_PART}/{_PART})[:/]([\w./-]+\.gguf)")
_METADATA = ["*.json", "tokenizer.model", "*.jinja"]
# Modules of sentence-transformers behind the network, of models with a modules.json.
_MODULES = ["[0-9]_*/config.json", "[0-9]_*/model.safetensors"]
# Some repositories have a second copy of the weights: in folders, or as consolidated files.
_IGNORED = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on the hub, or one GGUF file in it."""

    repo: str
    file: str | None  # a GGUF file; None: the safetensors model


def parse(text: str) -> HubModel | None:
    """Parse `org/name`, `org/name:FILE.gguf` or `org/name/FILE.gguf`; None for other forms."""
    with_file = _REPO_FILE.fullmatch(text)
    if with_file:
        return HubModel(with_file[1], with_file[2])
    repo = _REPO.fullmatch(text)
    if repo and not text.endswith(".gguf"):
        return HubModel(repo[1], None)
    return None


def fetch(model: HubModel, config: ModelConfig) -> Path:
    """Download a model, or find it in the hub's cache; returns its folder or file."""
    patterns = _METADATA if config.load_format == "dummy" else [*_METADATA, "*.safetensors"]
    path = _download(model, config, patterns)
    if (path / "modules.json").is_file():
        _download(model, config, _MODULES, ignored=[])
    if path.is_dir() and not (path / "config.json").is_file():
        raise DownloadError(
            f"hub model {model.repo} has no config.json. If it contains GGUF files, choose one: "
            f"{model.repo}:FILE.gguf"
        )
    return path


def fetch_adapter(repo: str, config: ModelConfig) -> Path:
    """Download an adapter; returns its folder. --revision applies to the model only."""
    return _download(HubModel(repo, None), replace(config, revision=None), ["adapter_*"])


def _download(
    model: HubModel, config: ModelConfig, patterns: list[str], ignored: list[str] = _IGNORED
) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    # Transport errors (proxy, timeout) derive from the HTTP library's base class, not from OSError.
    http_base: type[Exception] = HfHubHTTPError.__bases__[0]
    revision, token, folder = config.revision, config.hf_token, config.download_dir
    try:
        if model.file is not None:
            found = huggingface_hub.hf_hub_download(
                model.repo, model.file, cache_dir=folder, revision=revision, token=token
            )
        else:
            found = huggingface_hub.snapshot_download(
                model.repo,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                cache_dir=folder,
                revision=revision,
                token=token,
            )
    except (OSError, http_base, EntryNotFoundError, HFValidationError) as error:
        raise _download_error(model, config, error) from error
    return Path(found)


def _download_error(model: HubModel, config: ModelConfig, error: Exception) -> DownloadError:
    from huggingface_hub import errors

    what = f"{model.repo}:{model.file}" if model.file else model.repo
    if isinstance(error, errors.GatedRepoError):
        reason = (
            "access is gated. Accept its licence on the hub, then pass --hf-token or set HF_TOKEN."
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "no such repository, or it is private. Check the spelling; for a private repository "
            "pass --hf-token or set HF_TOKEN."
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"it has no revision {config.revision!r}. Check --revision."
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = (
            "the hub cannot be reached, and the model is not in the local cache. Check the network "
            "and HF_HUB_OFFLINE, or download it elsewhere and give the folder's path."
        )
    elif isinstance(error, errors.EntryNotFoundError):
        reason = "the repository has no such file. Check the file's name."
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = "the disk is full. Free some space, or choose another disk with --download-dir."
    else:
        reason = "the download failed. Check the network, the proxy and --download-dir."
    detail = " ".join(str(error).split())
    return DownloadError(f"hub model {what}: {reason} ({type(error).__name__}: {detail})")
