"""The tokenizer of a folder: tokenizer.json, or tokenizer.model, and the small files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models import spm
from windlass.models.json_file import read_json_if_there
from windlass.models.tokenizer import TextSide, framed

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def load_text(path: Path) -> TextSide:
    """Read a folder, or one tokenizer file with its neighbours."""
    folder = path if path.is_dir() else path.parent
    settings = read_json_if_there(folder / "tokenizer_config.json")
    named = read_json_if_there(folder / "special_tokens_map.json") | settings
    backend, found = _backend(path)
    special = found | {
        name: text for name in _NAMES if (text := _content(named.get(name))) is not None
    }
    _add_listed(backend, settings.get("added_tokens_decoder") or {}, folder)
    if "add_bos_token" in settings or "add_eos_token" in settings:
        backend.post_processor = framed(
            _edge(backend, special.get("bos_token"), settings.get("add_bos_token")),
            _edge(backend, special.get("eos_token"), settings.get("add_eos_token")),
        )
    eos = _edge(backend, special.get("eos_token"), True)
    return TextSide(backend, special, (eos[1],) if eos else (), chat_template(folder))


def _backend(path: Path) -> tuple[Backend, dict[str, str]]:
    """The backend, and the special tokens that its own file names."""
    file = path
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            file = path / "tokenizer.model"
    if not file.is_file():
        raise CheckpointError(
            f"{path}: has neither tokenizer.json nor tokenizer.model"
            f"{_other_kinds(path)}. Give a tokenizer's folder with --tokenizer."
        )
    if file.suffix == ".model":
        return _sentence_piece(file)
    if file.suffix != ".json":
        raise UnsupportedError(
            f"{file}: is not a tokenizer. Give a folder, a tokenizer.json or a tokenizer.model."
        )
    return _from_json(file), {}


def _other_kinds(path: Path) -> str:
    others = [name for name in ("tekken.json", "vocab.json") if (path / name).is_file()]
    return f" (the {others[0]} that is there is not known here)" if others else ""


def _from_json(file: Path) -> Backend:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}.") from error
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{file}: is not a tokenizer of the tokenizers library: {error}. Fetch it again."
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _sentence_piece(file: Path) -> tuple[Backend, dict[str, str]]:
    vocabulary = spm.read_model(file)
    backend = spm.build(vocabulary)
    ids = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    special = {name: vocabulary.pieces[token] for name, token in ids.items() if token is not None}
    special["unk_token"] = vocabulary.pieces[vocabulary.unk_id]
    # SentencePiece files do not say it; every network that comes with one was trained with bos.
    backend.post_processor = framed(_edge(backend, special.get("bos_token"), True), None)
    return backend, special


def _content(token: Any) -> str | None:
    """Special tokens are written as a string, or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _edge(backend: Backend, text: str | None, wanted: bool | None) -> tuple[str, int] | None:
    token = backend.token_to_id(text) if text is not None and wanted else None
    return None if token is None or text is None else (text, token)


def _add_listed(backend: Backend, listed: dict[str, Any], folder: Path) -> None:
    """Tokens that tokenizer_config.json adds to those of the tokenizer's own file."""
    known = backend.get_added_tokens_decoder()
    for number, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if int(number) in known:
            continue
        flags = {key: entry[key] for key in ("lstrip", "rstrip", "normalized") if key in entry}
        token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
        backend.add_tokens([token])
        found = backend.token_to_id(entry["content"])
        if found != int(number):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: token {entry['content']!r} should have id "
                f"{number}, the tokenizer's file makes it {found}. Fetch both files again."
            )


def chat_template(folder: Path) -> str | None:
    """A file of its own goes before the field; of several named ones the default is taken."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json_if_there(folder / name).get("chat_template")
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
        if template is not None:
            return str(template)
    return None
