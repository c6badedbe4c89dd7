"""The tokenizer that a GGUF file carries in its metadata, rebuilt as a `tokenizers` backend.

Two kinds: "gpt2" (byte-level BPE, with a pre-tokenizer that the file names) and "llama"
(SentencePiece, see spm.py). A pre-tokenizer that is not known is refused: a wrong one gives ids
that are nearly right, which nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models import spm
from windlass.models.gguf_header import GGUFHeader
from windlass.models.tokenizer import TextSide, framed

_KEY = "tokenizer.ggml."
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS_AND_SPACES}"


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cut by each pattern in turn; what lies between two matches is a piece too."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How text is cut before BPE, under one name of tokenizer.ggml.pre."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is taken without merging
    add_bos: bool = False  # when the file does not say


_LLAMA3_SCHEME = _Scheme((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_SCHEME = _Scheme((_QWEN2,), nfc=True)
_SCHEMES = {
    "smollm": _Scheme((r"\p{N}", _GPT2)),
    "qwen2": _QWEN2_SCHEME,
    "deepseek-r1-qwen": _QWEN2_SCHEME,
    "llama-bpe": _LLAMA3_SCHEME,
    "llama3": _LLAMA3_SCHEME,
    "llama-v3": _LLAMA3_SCHEME,
    "gpt-2": _Scheme((_GPT2,)),
    "default": _Scheme((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def load_text(header: GGUFHeader) -> TextSide:
    """Everything that the file says about text."""
    metadata = _Metadata(header)
    kind = metadata.required("model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata)
    elif kind == "llama":
        backend, add_bos = _sentence_piece(metadata), True
    else:
        raise UnsupportedError(
            f"{header.path}: tokenizer model {kind!r} is not known; gpt2 and llama are. "
            "Give the original one with --tokenizer FOLDER."
        )
    ids = {name: metadata.token_id(f"{key}_token_id") for name, key in _NAMED.items()}
    named = {
        name: (metadata.pieces[token], token) for name, token in ids.items() if token is not None
    }
    backend.post_processor = framed(
        named.get("bos") if metadata.get("add_bos_token", add_bos) else None,
        named.get("eos") if metadata.get("add_eos_token", False) else None,
    )
    template = chat_template(header)
    return TextSide(
        backend,
        {f"{name}_token": text for name, (text, _) in named.items()},
        _eos_ids(metadata, template or ""),
        template,
    )


def chat_template(header: GGUFHeader) -> str | None:
    return header.metadata.get("tokenizer.chat_template")


class _Metadata:
    """The keys of the tokenizer, with the vocabulary checked once."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self.path = header.path
        self.pieces: list[str] = self.required("tokens")
        if not isinstance(self.pieces, list) or not self.pieces:
            raise CheckpointError(f"{self.path}: metadata {_KEY}tokens is not a list of tokens.")
        normal = [int(spm.PieceType.NORMAL)] * len(self.pieces)
        self.types: list[int] = self.per_token("token_type", normal)

    def get(self, name: str, default: Any = None) -> Any:
        return self._header.metadata.get(_KEY + name, default)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.path}: metadata {_KEY}{name} is missing, so there is no tokenizer. "
                "Give one with --tokenizer FOLDER."
            )
        return value

    def per_token(self, name: str, default: Any = None) -> Any:
        """A list with one entry for each token."""
        values = self.required(name) if default is None else self.get(name, default)
        if not isinstance(values, list) or len(values) != len(self.pieces):
            raise CheckpointError(
                f"{self.path}: metadata {_KEY}{name} is no list of {len(self.pieces)} values, "
                "one for each token."
            )
        return values

    def token_id(self, name: str) -> int | None:
        """An id that the vocabulary has; writers use the largest number for 'none'."""
        token = self.get(name)
        return token if token is not None and token < len(self.pieces) else None


def _byte_level(metadata: _Metadata) -> tuple[Tokenizer, bool]:
    """The backend, and whether texts begin with bos when the file does not say."""
    pre = metadata.get("pre")
    scheme = _SCHEMES.get(pre)
    if scheme is None:
        named = f"pre-tokenizer {pre!r} is not known" if pre else "no pre-tokenizer is named"
        raise UnsupportedError(
            f"{metadata.path}: {named}, so text would be cut wrongly. Known: {', '.join(_SCHEMES)}. "
            "Give the original tokenizer with --tokenizer FOLDER."
        )
    vocab = {piece: token for token, piece in enumerate(metadata.pieces)}
    model = models.BPE(
        vocab=vocab, merges=_merges(metadata, vocab), ignore_merges=scheme.whole_words
    )
    backend = Tokenizer(model)
    if scheme.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split(*scheme.patterns)
    backend.decoder = decoders.ByteLevel()
    spm.add_marked_tokens(backend, metadata.pieces, metadata.types)
    return backend, scheme.add_bos


def _merges(metadata: _Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in metadata.required("merges"):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                f"{metadata.path}: merge {text!r} names a piece that is not among the tokens."
            )
        merges.append((left, right))
    return merges


def _sentence_piece(metadata: _Metadata) -> Tokenizer:
    if metadata.get("remove_extra_whitespaces", False) or metadata.get("precompiled_charsmap"):
        raise UnsupportedError(
            f"{metadata.path}: the tokenizer normalises text, which is not known here. "
            "Give the original one with --tokenizer FOLDER."
        )
    return spm.build(
        spm.Vocabulary(
            metadata.pieces,
            metadata.per_token("scores"),
            metadata.types,
            add_space_prefix=metadata.get("add_space_prefix", True),
            unk_id=metadata.token_id("unknown_token_id") or 0,
        )
    )


def _eos_ids(metadata: _Metadata, template: str) -> tuple[int, ...]:
    """Where output ends: eos, the end-of-turn tokens that are named, and those a template writes.

    Many chat models are stored with the end of the text as eos, while their turns end with
    another token; without it they would go on to play the user.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [token for key in keys if (token := metadata.token_id(key)) is not None]
    for text in _END_OF_TURN:
        if text in template and text in metadata.pieces:
            found.append(metadata.pieces.index(text))
    return tuple(dict.fromkeys(found))
