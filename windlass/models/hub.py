"""Downloads models from the Hugging Face hub. Every failure becomes a DownloadError with advice."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.config import ModelConfig
from windlass.errors import DownloadError, UnsupportedError

_PART = r"[A-Za-z0-9][\w.-]*"
_REPO = re.compile(rf"({_PART}/{_PART})")
_REPO_FILE = re.compile(rf"({_PART}/{_PART})[:/]([\w./-]+\.gguf)")
_REPO_QUANT = re.compile(rf"({_PART}/{_PART}):([A-Za-z][\w-]*)")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
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
    quant: str | None = None  # of the GGUF file to choose: Q4_K_M


def parse(text: str) -> HubModel | None:
    """Parse `org/name`, `org/name:FILE.gguf`, `org/name/FILE.gguf` or `org/name:Q4_K_M`; None for other forms."""
    with_file = _REPO_FILE.fullmatch(text)
    if with_file:
        return HubModel(with_file[1], with_file[2])
    with_quant = _REPO_QUANT.fullmatch(text)
    if with_quant:
        return HubModel(with_quant[1], None, with_quant[2])
    repo = _REPO.fullmatch(text)
    if repo and not text.endswith(".gguf"):
        return HubModel(repo[1], None)
    return None


def fetch(model: HubModel, config: ModelConfig) -> Path:
    """Download a model, or find it in the hub's cache; returns its folder or file."""
    if model.quant is not None:
        model = HubModel(model.repo, choose_file(model, _gguf_files(model, config)))
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


def choose_file(model: HubModel, files: Sequence[str]) -> str:
    """The GGUF file of a repository whose name has the quantisation as a word, in any case."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(str(model.quant))}(?![A-Za-z0-9_])", re.I)
    found = [file for file in files if word.search(Path(file).stem)]
    what = f"hub model {model.repo}:{model.quant}"
    if not found:
        raise DownloadError(
            f"{what}: no GGUF file of the repository has {model.quant} in its name; it has "
            f"{', '.join(files) or 'no GGUF file'}."
        )
    whole = [file for file in found if not _SPLIT.search(Path(file).stem)]
    if not whole:
        raise UnsupportedError(
            f"{what}: {found[0]} is one of {len(found)} parts of a split GGUF, which is not supported. "
            "Download and merge them (llama-gguf-split --merge), or choose another quantisation."
        )
    if len(whole) > 1:
        raise DownloadError(
            f"{what}: several files have {model.quant} in their name. Choose one: "
            f"{', '.join(f'{model.repo}:{file}' for file in whole)}"
        )
    return whole[0]


def _gguf_files(model: HubModel, config: ModelConfig) -> list[str]:
    """The GGUF files of a repository with a language model; without a network, those in the cache."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    http_base: type[Exception] = HfHubHTTPError.__bases__[0]
    revision, token = config.revision, config.hf_token
    try:
        names = huggingface_hub.list_repo_files(model.repo, revision=revision, token=token)
    except HFValidationError as error:
        raise _download_error(model, config, error) from error
    except (OSError, http_base) as error:
        if isinstance(error, HfHubHTTPError):  # the hub has answered
            raise _download_error(model, config, error) from error
        names = _cached_files(model, config)
        if not names:
            raise _download_error(model, config, error) from error
    gguf = [name for name in names if name.endswith(".gguf")]
    return sorted(name for name in gguf if not Path(name).name.startswith("mmproj"))


def _cached_files(model: HubModel, config: ModelConfig) -> list[str]:
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            model.repo,
            allow_patterns=["*.gguf"],
            cache_dir=config.download_dir,
            revision=config.revision,
            local_files_only=True,
        )
    except OSError:  # LocalEntryNotFoundError: nothing of the repository is there
        return []
    return [path.relative_to(found).as_posix() for path in Path(found).rglob("*.gguf")]


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

    chosen = model.file or model.quant
    what = f"{model.repo}:{chosen}" if chosen else model.repo
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
