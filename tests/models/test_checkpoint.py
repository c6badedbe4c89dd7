"""Safetensors and dummy weights: reading, and errors for invalid files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.models.tiny import write_json
from windlass.errors import CheckpointError
from windlass.models.checkpoint import SafetensorsCheckpoint, StoredTensor
from windlass.models.dummy import ByteTokenizer, DummyCheckpoint


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5).bfloat16()}, path)
    return path


def test_tensors_are_read_in_full_and_by_rows(file):
    checkpoint = SafetensorsCheckpoint([file])
    assert set(checkpoint.names()) == {"a", "b"}
    assert checkpoint.stored("b") == StoredTensor((5,), "bf16", 10)
    assert torch.equal(checkpoint.read("a", (4, 3)), torch.arange(12.0).reshape(4, 3))
    assert checkpoint.read("a", (4, 3), (slice(1, 3),)).tolist() == [[3, 4, 5], [6, 7, 8]]
    assert checkpoint.read("b", (5,), (slice(2, 4),)).dtype == torch.bfloat16


def test_wrong_shape_names_both_shapes(file):
    with pytest.raises(CheckpointError, match=r"a has shape \[4, 3\], the network needs \[4, 4\]"):
        SafetensorsCheckpoint([file]).read("a", (4, 4))


def test_a_missing_tensor_is_named(file):
    with pytest.raises(CheckpointError, match="no tensor c among 2"):
        SafetensorsCheckpoint([file]).read("c", (1,))


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_file_is_rejected(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        SafetensorsCheckpoint([file])


@pytest.mark.parametrize(
    "header",
    [b"{not json", b"[]", b'{"a": {"dtype": "F32"}}', b'{"a": 3}', b'{"a": null}', b"[" * 200_000],
)
def test_corrupt_header_is_rejected(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: the header is corrupt"):
        SafetensorsCheckpoint([path])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_offsets": [-48, 0]}, "tensor a has shape"),
        ({"data_offsets": [0.0, 48.0]}, "tensor a has shape"),
        ({"shape": [4, 2]}, r"tensor a of \[4, 2\] F32 has 48 bytes"),
        ({"dtype": "BF16"}, r"tensor a of \[4, 3\] BF16 has 48 bytes"),
        ({"data_offsets": [4, 52]}, "tensor a begins at byte"),
        ({"dtype": None}, "TypeError"),
    ],
)
def test_inconsistent_offsets_are_rejected(file, changes, words):
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["a"] |= changes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CheckpointError, match=f"the header is corrupt.*{words}"):
        SafetensorsCheckpoint([file])


def test_garbage_is_rejected(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * 500)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        SafetensorsCheckpoint([path])


def test_duplicate_tensor_is_rejected(file, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(1)}, other)
    with pytest.raises(CheckpointError, match=r"in both model\.safetensors and other"):
        SafetensorsCheckpoint([file, other])


def test_inconsistent_index_is_rejected(file, tmp_path):
    index = write_json(tmp_path / "i.json", {"weight_map": {"z": "model.safetensors"}})
    with pytest.raises(CheckpointError, match=r"tensor z should be in model\.safetensors"):
        SafetensorsCheckpoint([file], index)


def test_dummy_weights_depend_on_seed_and_name_only():
    shape = (300, 70)
    whole = DummyCheckpoint(3).read("layer.weight", shape)
    assert torch.equal(whole, DummyCheckpoint(3).read("layer.weight", shape))
    assert torch.equal(
        whole[17:40], DummyCheckpoint(3).read("layer.weight", shape, (slice(17, 40),))
    )
    assert not torch.equal(whole, DummyCheckpoint(4).read("layer.weight", shape))
    assert not torch.equal(whole, DummyCheckpoint(3).read("other.weight", shape))
    assert whole.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.linalg.matrix_rank(whole) == 70


def test_dummy_norms_are_one_and_the_dtype_is_kept():
    norm = DummyCheckpoint(0, "bfloat16").read("model.layers.0.input_layernorm.weight", (8,))
    assert norm.dtype == torch.bfloat16
    assert norm.tolist() == [1.0] * 8
    assert list(DummyCheckpoint().names()) == []


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(1000, (7,))
    assert tokenizer.decode(tokenizer.encode("häß 😀")) == "häß 😀"
    assert tokenizer.decode([104, 7, 700]) == "h<700>"
    assert tokenizer.decode([7], skip_special=False) == "\x07"
    assert tokenizer.token_text(200) == "\ufffd"


def test_file_readers_import_without_torch():
    names = ["card", "checkpoint", "default_model", "dummy", "gguf_file", "source", "hparams"]
    code = "import sys\n" + "".join(f"import windlass.models.{name}\n" for name in names)
    code += "import json; print(json.dumps('torch' in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(found.stdout) is False
