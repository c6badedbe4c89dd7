"""SentencePiece BPE vocabularies, from a tokenizer.model or out of a GGUF, as a `tokenizers` backend.

The few fields that matter are read from the protobuf directly. Unigram models and text
normalisation other than the identity are refused: Llama and Mistral use neither.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.tokenizer import SPACE

_BPE = 2


class PieceType(IntEnum):
    """Kinds of vocabulary entry; SentencePiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_MARKED = frozenset(map(int, (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary with scores: of two possible merges the one with the higher score comes first."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    add_space_prefix: bool = True
    unk_id: int = 0
    bos_id: int | None = 1
    eos_id: int | None = 2
    merges: list[tuple[str, str]] | None = None  # None: derived from the scores


def build(vocabulary: Vocabulary, keeps_spaces: frozenset[str] | None = None) -> Tokenizer:
    """A backend that splits text as SentencePiece does, bytes for unknown characters included.

    `keeps_spaces`: see `add_marked_tokens`.
    """
    vocabulary = _with_space_runs(vocabulary)
    pieces = vocabulary.pieces
    merges = _merges(vocabulary) if vocabulary.merges is None else vocabulary.merges
    model = models.BPE(
        vocab={piece: token for token, piece in enumerate(pieces)},
        merges=merges,
        unk_token=pieces[vocabulary.unk_id],
        fuse_unk=True,
        byte_fallback=PieceType.BYTE in vocabulary.types,
    )
    backend = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    add_marked_tokens(backend, pieces, vocabulary.types, keeps_spaces)
    return backend


def add_marked_tokens(
    backend: Tokenizer,
    pieces: list[str],
    types: list[int],
    keeps_spaces: frozenset[str] | None = None,
) -> None:
    """Tell the backend which entries are never split; control tokens are special.

    With `keeps_spaces`, all other marked tokens swallow the whitespace that follows them.
    """
    marked = [
        AddedToken(
            piece,
            special=kind != PieceType.USER_DEFINED,
            normalized=False,
            rstrip=keeps_spaces is not None and piece not in keeps_spaces,
        )
        for piece, kind in zip(pieces, types, strict=True)
        if kind in _MARKED
    ]
    backend.add_tokens(marked)


def _with_space_runs(vocabulary: Vocabulary) -> Vocabulary:
    """Spell runs of spaces as SentencePiece does.

    Gemma's vocabulary has them as user-defined pieces, which converters to GGUF write with real
    spaces. Text has no spaces left when pieces are merged, so such a piece would never be found.
    """
    pieces, scores = list(vocabulary.pieces), list(vocabulary.scores)
    for token, piece in enumerate(pieces):
        if vocabulary.types[token] == PieceType.USER_DEFINED and set(piece) <= {" ", SPACE}:
            pieces[token] = SPACE * len(piece)
            # Learned pieces have scores up to zero: runs go before them, the longest first.
            scores[token] = float(len(piece))
    return replace(vocabulary, pieces=pieces, scores=scores)


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, the highest score first."""
    scores, usable = vocabulary.scores, {}
    for token, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True)):
        if kind == PieceType.NORMAL or scores[token] > 0:  # learned, or a run of spaces
            usable[piece] = token
    merges: list[tuple[str, str]] = []
    for piece in sorted(usable, key=lambda piece: (-scores[usable[piece]], usable[piece])):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in usable and right in usable]
        merges += sorted(pairs, key=lambda pair: (usable[pair[0]], usable[pair[1]]))
    return merges


def read_model(path: Path) -> Vocabulary:
    """Read a SentencePiece tokenizer.model."""
    try:
        return _vocabulary(path.read_bytes(), path)
    except (IndexError, UnicodeDecodeError, struct.error, ValueError) as error:
        raise CheckpointError(
            f"{path}: is not a SentencePiece model, or is damaged ({error}). Fetch it again."
        ) from error


def _vocabulary(data: bytes, path: Path) -> Vocabulary:
    pieces, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            entry = dict(_fields(value))
            pieces.append(entry[1].decode())
            scores.append(entry.get(2, 0.0))
            types.append(entry.get(3, int(PieceType.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    _refuse_unknown(trainer, normalizer, path)
    return Vocabulary(
        pieces,
        scores,
        types,
        add_space_prefix=bool(normalizer.get(3, 1)),
        unk_id=trainer.get(40, 0),
        bos_id=_id_or_none(trainer.get(41, 1)),
        eos_id=_id_or_none(trainer.get(42, 2)),
    )


def _refuse_unknown(trainer: dict[int, Any], normalizer: dict[int, Any], path: Path) -> None:
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedError(
            f"{path}: is a SentencePiece model of type {trainer.get(3, 1)}; only BPE (2) is known. "
            "Convert it to tokenizer.json."
        )
    if normalizer.get(2) or normalizer.get(4, 1):
        name = normalizer.get(1, b"unnamed").decode()
        raise UnsupportedError(
            f"{path}: normalises text ({name}, or extra spaces removed), which is not known here. "
            "Convert it to tokenizer.json."
        )


def _id_or_none(value: int) -> int | None:
    """A negative id, which protobuf writes as a huge number, means: no such token."""
    return value if value < 1 << 31 else None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Walk one protobuf message: field numbers with ints, floats or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif wire == 1:
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it is cut off")
            yield key >> 3, data[at : at + size]
            at += size
        elif wire == 5:
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
