"""Model files of an attacker: damaged or absurd ones are an error with bounded memory, never a crash."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.models import tiny
from windlass.config import ModelConfig
from windlass.errors import EngineError
from windlass.models.card import read_headers
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_header import read_header
from windlass.models.json_file import read_json
from windlass.models.source import resolve
from windlass.models.tokenizer_files import load_text

FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
MAX_BYTES = 32 * 2**20  # of Python's memory, for files of some kilobytes
NUMBERS = st.sampled_from(
    [-1, 0, 1, 7, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**200]
)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block allocates more than MAX_BYTES."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


# ---- safetensors -----------------------------------------------------------------------------


def open_safetensors(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Open and read a file with this header; an EngineError is the only exception allowed."""
    announced = len(header) if length is None else length
    path.write_bytes((announced % 2**64).to_bytes(8, "little") + header + data)
    with bounded(), suppress(EngineError):
        checkpoint = SafetensorsCheckpoint([path])
        for name in checkpoint.names():
            checkpoint.read(name, checkpoint.stored(name).shape)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F8_E4M3", "BOOL", "I999", ""])
        | JSON_VALUES,
        "shape": st.lists(NUMBERS, max_size=5) | JSON_VALUES,
        "data_offsets": st.lists(NUMBERS, max_size=3) | JSON_VALUES,
    },
)


@FUZZ
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | JSON_VALUES))
def test_any_json_header_of_safetensors(tmp_path: Path, header: dict[str, Any]) -> None:
    open_safetensors(tmp_path / "m.safetensors", json.dumps(header).encode(), bytes(64))


@FUZZ
@given(length=NUMBERS, at=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_damaged_headers_of_safetensors(
    tmp_path: Path, length: int, at: int, byte: int, cut: int
) -> None:
    header = bytearray(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}')
    header[at % len(header)] = byte
    path = tmp_path / "m.safetensors"
    open_safetensors(path, bytes(header), bytes(16))
    open_safetensors(path, bytes(header), bytes(16), length)
    open_safetensors(path, bytes(header)[:cut], bytes(16))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
         "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**70]}},
    ],
    ids=["overlapping", "overflowing", "dimensions", "outside"],
)  # fmt: skip
def test_tensors_that_lie_are_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    path = tmp_path / "m.safetensors"
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(EngineError):
        SafetensorsCheckpoint([path])


# ---- GGUF ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    tiny.write_gguf(path, "qwen3", tiny.Type.F16, tiny.gguf_tensors("qwen3"))
    return path.read_bytes()


def header_bytes(gguf_file: bytes) -> int:
    return gguf_file.rindex(b"output_norm.weight") + 64


@FUZZ
@given(data=st.data())
def test_damaged_headers_of_gguf(tmp_path: Path, gguf_file: bytes, data: st.DataObject) -> None:
    raw = bytearray(gguf_file)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes(gguf_file)))
        value = data.draw(NUMBERS | st.integers(0, 255))
        packed = struct.pack("<Q", value % 2**64)[: data.draw(st.sampled_from([1, 4, 8]))]
        raw[at : at + len(packed)] = packed
    path = tmp_path / "m.gguf"
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), 23, 24, 100, 2000]))])
    config = ModelConfig(model=str(path))
    with bounded(), suppress(EngineError):
        read_headers(resolve(config), config)


@pytest.mark.parametrize("count_at", [8, 16])
def test_huge_counts_of_gguf_are_refused_at_once(
    tmp_path: Path, gguf_file: bytes, count_at: int
) -> None:
    raw = bytearray(gguf_file)
    raw[count_at : count_at + 8] = b"\xff" * 8
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with bounded(), pytest.raises(EngineError, match="announces"):
        read_header(path)


# ---- JSON ------------------------------------------------------------------------------------


@FUZZ
@given(name=st.sampled_from(sorted(tiny.CONFIG)), value=NUMBERS | JSON_VALUES)
def test_absurd_values_of_a_config(name: str, value: Any) -> None:
    with bounded(), suppress(EngineError):
        read_hparams({**tiny.CONFIG, name: value})


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"a":' * 10**5, "1" * 10**5, '{"a": "\\ud800"}', "\xff", "", "[]", "NaN"]
)
def test_hostile_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with suppress(EngineError):
        assert isinstance(read_json(path), dict)


def test_a_json_file_has_a_maximum_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse: takes no space on the disk
    with pytest.raises(EngineError, match="larger than 64 MiB"):
        read_json(path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"] * 5}},
        {"model": {"type": "Evil"}},
        {"added_tokens": [{"id": 2**31, "content": "x", "special": True}]},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
        {"version": "9"},
    ],
)
def test_absurd_tokenizers(tmp_path: Path, change: dict[str, Any]) -> None:
    base = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({**base, **change}))
    with bounded(), suppress(EngineError):
        load_text(tmp_path).backend.encode("a")


# ---- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "{outside}", "a/../../outside", "\0", ""]
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, shard: str) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"a": torch.zeros(4)}, outside)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG))
    named = {"weight_map": {"a": shard.format(outside=outside)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(named))
    with pytest.raises(EngineError, match="inside of the model's folder"):
        resolve(ModelConfig(model=str(folder)))
