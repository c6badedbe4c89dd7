"""The tokenizer that a GGUF file carries in its metadata, rebuilt as a `tokenizers` backend.

Three kinds: "gpt2" (byte-level BPE, split as pre_tokenizers.py says), "llama" (SentencePiece, see
spm.py) and "gemma4" (SentencePiece pieces with merges in the file).
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models import spm
from windlass.models.fim import FIM_PARTS, fim_tokens
from windlass.models.gguf_header import GGUFHeader
from windlass.models.pre_tokenizers import PreTokenizer, pre_tokenizer
from windlass.models.tokenizer import TextSide, framed

_KEY = "tokenizer.ggml."
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
# Special tokens of Phi-3, except these, consume the whitespace after them. GGUF files do not store this.
_PHI3_KEEPS_SPACES = frozenset(("<unk>", "<s>", "<|endoftext|>"))


def load_text(header: GGUFHeader) -> TextSide:
    """The tokenizer metadata of a GGUF file."""
    metadata = _Metadata(header)
    kind = metadata.required("model")
    if kind == "gpt2":
        row = pre_tokenizer(metadata.get("pre"), metadata.path)
        backend, add_bos = _byte_level(metadata, row), row.add_bos
    elif kind in ("llama", "gemma4"):
        backend, add_bos = _sentence_piece(metadata, has_merges=kind == "gemma4"), True
    else:
        raise UnsupportedError(
            f"{header.path}: tokenizer model {kind!r} is not known; gpt2, llama and gemma4 are. "
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
        backend=backend,
        special_tokens={f"{name}_token": text for name, (text, _) in named.items()},
        eos_ids=_eos_ids(metadata, template or ""),
        chat_template=template,
        fim=fim_tokens(backend, {part: _fim_id(metadata, part) for part in FIM_PARTS}),
    )


def _fim_id(metadata: _Metadata, part: str) -> int | None:
    """The id of a FIM token under its current name, or under that of older files."""
    found = metadata.token_id(f"fim_{part[:3]}_token_id")
    return metadata.token_id(f"{part}_token_id") if found is None else found


def chat_template(header: GGUFHeader) -> str | None:
    return header.metadata.get("tokenizer.chat_template")


class _Metadata:
    """The keys of the tokenizer, with the vocabulary checked once."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header
        self.path = header.path
        self.architecture = header.metadata.get("general.architecture")
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
                f"{self.path}: metadata {_KEY}{name} is not a list of {len(self.pieces)} values, "
                "one for each token."
            )
        return values

    def token_id(self, name: str) -> int | None:
        """An id that the vocabulary has; writers use the largest number for 'none'."""
        token = self.get(name)
        return token if token is not None and token < len(self.pieces) else None


def _byte_level(metadata: _Metadata, row: PreTokenizer) -> Tokenizer:
    vocab = {piece: token for token, piece in enumerate(metadata.pieces)}
    model = models.BPE(
        vocab=vocab, merges=_merges(metadata, vocab), ignore_merges=row.ignore_merges
    )
    backend = Tokenizer(model)
    if row.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    spm.add_marked_tokens(backend, metadata.pieces, metadata.types)
    return backend


def _merges(metadata: _Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in metadata.required("merges"):
        left, _, right = text.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(
                f"{metadata.path}: merge {text!r} uses or makes a token that is not in the vocabulary."
            )
        merges.append((left, right))
    return merges


def _sentence_piece(metadata: _Metadata, has_merges: bool) -> Tokenizer:
    if metadata.get("remove_extra_whitespaces", False) or metadata.get("precompiled_charsmap"):
        raise UnsupportedError(
            f"{metadata.path}: the tokenizer normalises text with a SentencePiece character map, "
            "which is not supported. Give the original one with --tokenizer FOLDER."
        )
    merges = None
    if has_merges:
        merges = _merges(metadata, {piece: token for token, piece in enumerate(metadata.pieces)})
    return spm.build(
        spm.Vocabulary(
            metadata.pieces,
            metadata.per_token("scores", [0.0] * len(metadata.pieces) if has_merges else None),
            metadata.types,
            add_space_prefix=metadata.get("add_space_prefix", not has_merges),
            unk_id=metadata.token_id("unknown_token_id") or 0,
            merges=merges,
        ),
        keeps_spaces=_PHI3_KEEPS_SPACES if metadata.architecture == "phi3" else None,
    )


def _eos_ids(metadata: _Metadata, template: str) -> tuple[int, ...]:
    """The tokens that end an output: EOS, named end-of-turn tokens, and those of the chat template.

    Many chat models are stored with the end-of-text token as EOS, although their turns end with
    another token. Without that token they would also generate the user's turn.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [token for key in keys if (token := metadata.token_id(key)) is not None]
    for text in _END_OF_TURN:
        if text in template and text in metadata.pieces:
            found.append(metadata.pieces.index(text))
    return tuple(dict.fromkeys(found))
