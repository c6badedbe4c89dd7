"""Original vocabularies of seven families, read from a GGUF and from a folder, on 250 strings.

The ids are those of the whole original tokenizers; original_tokenizers.py wrote them down.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.models import tiny
from tests.models.original_tokenizers import EXTRACTS, has_control_token
from tests.models.tokenizer_strings import STRINGS
from windlass.core.sampling import SamplingParams
from windlass.models import gguf_tokenizer, tokenizer_files
from windlass.models.gguf_header import read_header
from windlass.models.tokenizer import HFTokenizer, TextSide
from windlass.text.stream import TextStream

FAMILIES = sorted(path.stem for path in EXTRACTS.glob("*.json"))
WITH_JSON = [family for family in FAMILIES if family != "mistral-7b"]


@cache
def extract(family: str) -> dict[str, Any]:
    return json.loads((EXTRACTS / f"{family}.json").read_text())


class Case:
    """One family's tokenizer and what its original makes of the strings."""

    def __init__(self, family: str, side: TextSide) -> None:
        self.tokenizer = HFTokenizer(side.backend, side.eos_ids)
        self.rows: list[tuple[str, list[int], str]] = []  # string, ids, decoded ids
        content, numbers = extract(family), renumbered(family)
        for index, text in enumerate(STRINGS):
            if content["tokenizer_json"] is None and has_control_token(content["gguf"], text):
                continue
            ids = [numbers[token] for token in content["ids"][index]]
            self.rows.append((text, ids, content["decoded"].get(str(index), text)))


def renumbered(family: str) -> dict[int, int]:
    """Ids of the original, and where the extract has the same tokens."""
    return {token: index for index, token in enumerate(extract(family)["token_ids"])}


@pytest.fixture(scope="module", params=FAMILIES)
def from_gguf(request, tmp_path_factory) -> Case:
    gguf = extract(request.param)["gguf"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in gguf.items()}
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    side = gguf_tokenizer.load_text(read_header(tiny.write_gguf(path, metadata=metadata)))
    return Case(request.param, side)


@pytest.fixture(scope="module", params=WITH_JSON)
def from_folder(request, tmp_path_factory) -> Case:
    gguf, settings = extract(request.param)["gguf"], extract(request.param)["tokenizer_json"]
    numbers = renumbered(request.param)
    vocab = {piece: token for token, piece in enumerate(gguf["tokens"])}
    content = settings | {
        "model": settings["model"] | {"vocab": vocab, "merges": gguf["merges"]},
        "added_tokens": [e | {"id": numbers[e["id"]]} for e in settings["added_tokens"]],
    }
    folder = tmp_path_factory.mktemp("folder")
    tiny.write_json(folder / "tokenizer.json", content)
    return Case(request.param, tokenizer_files.load_text(folder))


def check_ids_and_text(case: Case) -> None:
    tokenizer = case.tokenizer
    for text, ids, decoded in case.rows:
        assert tokenizer.encode(text, add_special=False) == ids, ascii(text)
        assert tokenizer.decode(ids, skip_special=False) == decoded, ascii(text)


def test_ids_from_a_gguf_equal_the_original(from_gguf):
    check_ids_and_text(from_gguf)


def test_ids_from_a_folder_equal_the_original(from_folder):
    check_ids_and_text(from_folder)


def test_text_grows_token_by_token_into_the_same_text(from_gguf):
    sampling = SamplingParams(skip_special_tokens=False)
    for text, ids, decoded in from_gguf.rows:
        stream = TextStream(from_gguf.tokenizer, sampling)
        grown = "".join(stream.push([token]).text for token in ids)
        assert grown + stream.push([], last=True).text == decoded, ascii(text)


def test_bytes_of_the_tokens_are_the_bytes_of_the_text(from_gguf):
    tokenizer = from_gguf.tokenizer
    for text, ids, decoded in from_gguf.rows:
        joined = b"".join(map(tokenizer.token_bytes, ids))
        prefix = b"" if tokenizer.byte_pieces(False) is not None or not ids else b" "
        assert joined == prefix + decoded.encode(), ascii(text)


def test_the_strings_are_250_and_every_extract_has_them_all():
    assert len(STRINGS) == len(set(STRINGS)) == 250
    assert FAMILIES
    for family in FAMILIES:
        assert len(extract(family)["ids"]) == 250, family
