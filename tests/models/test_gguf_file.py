"""GGUF files: tensors, rows, names, the config in the metadata, and every way to be broken."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from tests.models import tiny
from tests.models.tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Type, write_gguf
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.gguf_header import TENSOR_TYPES, read_header

ATTENTION = "model.layers.1.self_attn."


def stored_as(tensor: np.ndarray, kind: Type) -> np.ndarray:
    return dequantize(quantize(tensor, kind), kind)


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp's converter stores q and k."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def test_tensor_types_match_the_gguf_package():
    for number, kind in TENSOR_TYPES.items():
        theirs = Type(number)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == tuple(kind)


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0]
)
def test_every_format_is_read_in_full_and_by_rows(tmp_path, kind):
    tensors = tiny.gguf_tensors("qwen2")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "qwen2", kind, tensors))
    expected = stored_as(tensors["blk.1.ffn_down.weight"], kind)
    name, shape = "model.layers.1.mlp.down_proj.weight", (HIDDEN, tiny.FFN)
    whole = checkpoint.read(name, shape)
    assert torch.equal(whole.float(), torch.from_numpy(expected))
    assert torch.equal(checkpoint.read(name, shape, (slice(10, 31),)), whole[10:31])
    plain = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}
    assert whole.dtype == plain.get(kind, torch.float32)
    assert checkpoint.stored(name).format.upper() == kind.name


def test_super_blocks_are_read(tmp_path):
    raw = np.random.default_rng(0).integers(0, 255, (HIDDEN, 2 * 144), dtype=np.uint8)
    raw[:, 0:4] = raw[:, 144:148] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    tensors = tiny.gguf_tensors("qwen3")
    path = write_gguf(tmp_path / "m.gguf", "qwen3", Type.F32, tensors)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=Type.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFCheckpoint(path).read("model.layers.0.mlp.down_proj.weight", (HIDDEN, tiny.FFN))
    assert torch.equal(read, torch.from_numpy(dequantize(raw, Type.Q4_K)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rows_of_q_and_k_are_reordered(tmp_path, architecture):
    tensors = tiny.gguf_tensors(architecture)
    q, k = tensors["blk.1.attn_q.weight"].copy(), tensors["blk.1.attn_k.weight"].copy()
    if architecture == "llama":
        tensors["blk.1.attn_q.weight"] = permuted(q, HEADS)
        tensors["blk.1.attn_k.weight"] = permuted(k, KV_HEADS)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, Type.Q8_0, tensors))
    for name, original in (("q_proj", q), ("k_proj", k)):
        expected = torch.from_numpy(stored_as(original, Type.Q8_0))
        read = checkpoint.read(f"{ATTENTION}{name}.weight", original.shape)
        assert torch.equal(read, expected)
        part = checkpoint.read(f"{ATTENTION}{name}.weight", original.shape, (slice(33, 70),))
        assert torch.equal(part, expected[33:70])


def test_biases_of_llama_files_are_reordered_too(tmp_path):
    tensors = tiny.gguf_tensors("llama")
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    for layer in range(tiny.LAYERS):
        tensors[f"blk.{layer}.attn_q.bias"] = permuted(bias, HEADS)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", Type.F32, tensors))
    assert checkpoint.read(f"{ATTENTION}q_proj.bias", bias.shape).tolist() == bias.tolist()
    assert read_hparams(checkpoint.hf_config()).qkv_bias


def test_names_are_those_of_transformers(tmp_path):
    names = set(GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "qwen3")).names())
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= names
    assert {ATTENTION + "q_norm.weight", ATTENTION + "o_proj.weight"} <= names
    assert "model.layers.0.post_attention_layernorm.weight" in names
    assert not any(name.startswith("blk") for name in names)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_metadata_becomes_a_config(tmp_path, architecture, name):
    path = write_gguf(
        tmp_path / "m.gguf", architecture, metadata={"tokenizer.ggml.eos_token_id": 5}
    )
    spec = read_hparams(GGUFCheckpoint(path).hf_config(), str(path))
    assert spec.architecture == name
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (spec.hidden_size, spec.vocab_size, spec.num_layers) == (HIDDEN, tiny.VOCAB, tiny.LAYERS)
    assert spec.rope.theta == 5000.0
    assert spec.tie_embeddings
    assert spec.eos_ids == (5,)
    assert spec.qk_norm == ("head" if architecture == "qwen3" else None)
    assert spec.qkv_bias == (architecture == "qwen2")


def test_rope_scaling_and_windows_are_read(tmp_path):
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.dimension_count": 32,
        "llama.attention.sliding_window": 64,
    }
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    spec = read_hparams(GGUFCheckpoint(path).hf_config())
    assert (spec.rope.kind, spec.rope.factor, spec.rope.dim) == ("yarn", 4.0, 32)
    assert spec.max_positions == 512
    assert spec.architecture == "MistralForCausalLM"
    assert spec.sliding_windows == (64, 64)


def test_llama3_rope_factors_are_read(tmp_path):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    tensors = tiny.gguf_tensors("llama") | {"rope_freqs.weight": factors}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert read_hparams(checkpoint.hf_config()).rope.rope_factors == tuple(factors.tolist())
    assert not any("rope" in name for name in checkpoint.names())


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"general.architecture": "mamba"}, UnsupportedError, "'mamba' is not supported"),
        ({"llama.attention.head_count": 0}, CheckpointError, "attention.head_count is 0"),
        ({"llama.context_length": "long"}, CheckpointError, "context_length is 'long'"),
        ({"llama.expert_count": 8}, CheckpointError, "num_experts_per_tok"),
        ({"llama.attention.value_length": 32}, UnsupportedError, "head size of keys is 64"),
        ({"llama.block_count": None}, CheckpointError, "field 'block_count' is missing"),
        ({"llama.attention.head_count_kv": [1, 2]}, UnsupportedError, "differs between layers"),
        ({"llama.rope.scaling.type": "ntk"}, UnsupportedError, "'ntk'"),
        ({"llama.rope.scaling.type": "longrope"}, CheckpointError, "short_factor has 0 factors"),
    ],
)
def test_unknown_metadata_is_rejected_by_name(tmp_path, metadata, error, message):
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(error, match=r"m\.gguf") as caught:
        read_hparams(GGUFCheckpoint(path).hf_config(), str(path))
    assert message in str(caught.value)


def test_an_unknown_tensor_is_rejected_by_name(tmp_path):
    tensors = tiny.gguf_tensors("llama") | {"blk.0.ssm_a.weight": np.ones(4, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ssm_a\.weight"):
        GGUFCheckpoint(path)


def test_wrong_shapes_and_missing_tensors_are_named(tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"shape \[96, 256\], the network needs \[97, 256\]"):
        checkpoint.read("model.embed_tokens.weight", (97, 256))
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        checkpoint.read("lm_head.weight", (96, 256))


def test_a_truncated_file_is_rejected(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    header_end = min(tensor.offset for tensor in read_header(path).tensors.values())
    cuts = [*range(0, header_end, 37), header_end, len(data) // 2, len(data) - 1]
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises((CheckpointError, UnsupportedError), match=r"m\.gguf"):
            GGUFCheckpoint(path)


def test_a_corrupt_header_never_crashes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    random = np.random.default_rng(1)
    for _ in range(150):
        broken = bytearray(data)
        at = int(random.integers(4, 1500))
        broken[at : at + 8] = random.bytes(8)
        path.write_bytes(broken)
        try:
            read_hparams(GGUFCheckpoint(path).hf_config(), str(path))
        except (CheckpointError, UnsupportedError) as error:
            assert "m.gguf" in str(error)  # noqa: PT017 - some damage is harmless


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (b"PK\x03\x04", CheckpointError, "not a GGUF file: it starts with b'PK"),
        (b"GGUF" + struct.pack("<I", 1), UnsupportedError, "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3), UnsupportedError, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1), CheckpointError, "announces"),
    ],
)
def test_other_file_types_are_rejected(tmp_path, start, error, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(start.ljust(100, b"\0"))
    with pytest.raises(error, match=r"m\.gguf") as caught:
        GGUFCheckpoint(path)
    assert message in str(caught.value)


def test_an_unknown_storage_type_is_rejected(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((2, 4), np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="storage type 26"):
        GGUFCheckpoint(path)
