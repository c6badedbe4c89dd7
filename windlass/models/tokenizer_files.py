"""The tokenizer of a folder: tokenizer.json, or tokenizer.model, and the small files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models import spm
from windlass.models.fim import FIM_PARTS, fim_tokens
from windlass.models.json_file import read_json_if_there
from windlass.models.tokenizer import TextSide, framed

_FILES = ("tokenizer.json", "tokenizer.model")
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_text(path: Path) -> TextSide:
    """Read a folder, or a tokenizer file and the files beside it."""
    folder = path if path.is_dir() else path.parent
    settings = read_json_if_there(folder / "tokenizer_config.json")
    named = read_json_if_there(folder / "special_tokens_map.json") | settings
    file = _file(path)
    special: dict[str, str] = {}
    if file.suffix == ".model":
        backend, special = _sentence_piece(file, settings)
    else:
        # A tokenizer.json defines BOS and EOS itself. transformers 5 also ignores add_bos_token and
        # add_eos_token if there is a tokenizer.json.
        backend = _from_json(file)
    special |= {name: text for name in _NAMES if (text := _content(named.get(name))) is not None}
    _add_listed(backend, settings.get("added_tokens_decoder") or {}, folder)
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return TextSide(
        backend=backend,
        special_tokens=special,
        eos_ids=() if eos is None else (eos,),
        chat_template=chat_template(folder),
        fim=fim_tokens(
            backend,
            {part: _token_id(backend, settings.get(f"{part}_token")) for part in FIM_PARTS},
        ),
    )


def _token_id(backend: Backend, token: Any) -> int | None:
    text = _content(token)
    return None if text is None else backend.token_to_id(text)


def _file(path: Path) -> Path:
    """The file with the vocabulary."""
    if not path.is_dir():
        if path.suffix not in (".json", ".model"):
            raise UnsupportedError(
                f"{path}: is not a tokenizer. Give a folder, a tokenizer.json or a tokenizer.model."
            )
        return path
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(
        f"{path}: has neither {' nor '.join(_FILES)}{_other_kinds(path)}. "
        "Give a tokenizer's folder with --tokenizer."
    )


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


def _sentence_piece(file: Path, settings: dict[str, Any]) -> tuple[Backend, dict[str, str]]:
    """The backend, and the special tokens that the file itself names."""
    vocabulary = spm.read_model(file)
    backend = spm.build(vocabulary)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unk": vocabulary.unk_id}
    named = {
        name: (vocabulary.pieces[token], token) for name, token in ids.items() if token is not None
    }
    # The file does not say whether texts begin with bos; networks that come with one expect it.
    backend.post_processor = framed(
        named.get("bos") if settings.get("add_bos_token", True) else None,
        named.get("eos") if settings.get("add_eos_token", False) else None,
    )
    return backend, {f"{name}_token": text for name, (text, _) in named.items()}


def _content(token: Any) -> str | None:
    """Special tokens are written as a string, or as an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


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
                f"{number}, the tokenizer's file makes it {found}. Download both files again."
            )


def chat_template(folder: Path) -> str | None:
    """The template's own file, else the field; of several named templates the default."""
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
