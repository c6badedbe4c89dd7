"""Cards, hyper-parameters and checkpoints of models; the default model against transformers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tests.models import tiny
from windlass.config import ModelConfig
from windlass.core.sampling import SamplingParams
from windlass.errors import CheckpointError, ConfigError
from windlass.models import gguf_file
from windlass.models.card import load_card, load_hparams, open_checkpoint
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.dummy import DummyCheckpoint
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.gguf_header import read_header
from windlass.models.source import ModelFiles, resolve
from windlass.text.stream import TextStream


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {char: token for token, char in enumerate(alphabet, start=1)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ own }}"}
    tiny.write_json(folder / "tokenizer_config.json", settings)


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tiny.write_folder(tmp_path / "m", {"a": torch.ones(3)}, eos_token_id=5)
    write_tokenizer(path)
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "eos_token_id": [7, 5]}
    tiny.write_json(path / "generation_config.json", generation | {"do_sample": True})
    return path


def opened(path, **options) -> tuple[ModelFiles, ModelConfig]:
    config = ModelConfig(model=str(path), **options)
    return resolve(config), config


def test_card_of_a_folder(folder):
    card = load_card(*opened(folder))
    assert (card.name, card.architecture, card.max_positions) == ("m", "LlamaForCausalLM", 128)
    assert card.tokenizer.eos_ids == (7, 5, 0)
    assert card.special_tokens == {"eos_token": "<eos>"}
    assert card.chat_template == "{{ own }}"
    assert card.default_sampling == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert load_card(*opened(folder, generation_config="none")).default_sampling == {}


def test_sampling_defaults_can_be_overridden(folder):
    overrides = {"temperature": 0.1, "max_new_tokens": 7}
    card = load_card(*opened(folder, override_generation_config=overrides))
    assert card.default_sampling == {"temperature": 0.1, "top_k": 20, "max_tokens": 7}
    for bad, message in (({"temprature": 1}, "Known: temperature"), ({"top_p": 0}, "top_p")):
        with pytest.raises(ConfigError, match=message):
            load_card(*opened(folder, override_generation_config=bad))


def test_invalid_sampling_defaults_are_rejected(folder):
    tiny.write_json(folder / "generation_config.json", {"top_p": 7})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p must be in"):
        load_card(*opened(folder))


def test_overrides_are_merged_into_the_config(folder):
    overrides = {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}
    spec = load_hparams(*opened(folder, hf_overrides=overrides))
    assert spec.max_positions == 256
    assert spec.rope.kind == "linear"


def test_invalid_config_is_rejected(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: is not valid JSON"):
        load_hparams(*opened(folder))
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="contains a JSON list"):
        load_hparams(*opened(folder))


def test_tokenizer_option_replaces_the_tokenizer(folder, tmp_path):
    path = tiny.write_gguf(tmp_path / "g.gguf", metadata={"tokenizer.chat_template": "of the file"})
    with pytest.raises(CheckpointError, match="--tokenizer FOLDER"):
        load_card(*opened(path))
    assert load_card(*opened(path, tokenizer=str(folder))).chat_template == "{{ own }}"
    (folder / "tokenizer_config.json").unlink()
    card = load_card(*opened(path, tokenizer=str(folder / "tokenizer.json")))
    assert card.chat_template == "of the file"
    assert card.tokenizer.decode(card.tokenizer.encode("häß")) == "häß"
    with pytest.raises(CheckpointError, match="--tokenizer: no such"):
        load_card(*opened(path, tokenizer=str(tmp_path / "nowhere")))


def test_dummy_weights_need_only_a_config(tmp_path):
    path = tiny.write_json(tmp_path / "config.json", tiny.config(torch_dtype="bfloat16"))
    files, config = opened(path, load_format="dummy", seed=3)
    card = load_card(files, config)
    assert card.tokenizer.encode("A") == [65]
    assert card.chat_template is None
    checkpoint = open_checkpoint(files, config)
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.read("x.weight", (2, 2)).dtype == torch.bfloat16
    _, float32 = opened(path, load_format="dummy", dtype="float32")
    assert open_checkpoint(files, float32).read("x.weight", (2, 2)).dtype == torch.float32


def test_open_checkpoint_by_kind(folder, tmp_path):
    assert isinstance(open_checkpoint(*opened(folder)), SafetensorsCheckpoint)
    path = tiny.write_gguf(tmp_path / "g.gguf")
    assert isinstance(open_checkpoint(*opened(path)), GGUFCheckpoint)
    assert isinstance(open_checkpoint(*opened(path, load_format="dummy")), DummyCheckpoint)


@pytest.mark.model
def test_default_card(default_gguf, monkeypatch):
    headers = []
    monkeypatch.setattr(
        gguf_file, "read_header", lambda path: headers.append(path) or read_header(path)
    )
    monkeypatch.setattr(GGUFCheckpoint, "_blocks", lambda *_: pytest.fail("read a tensor"))
    files, config = opened("default")
    card = load_card(files, config)
    assert headers == [default_gguf]
    load_hparams(files, config)
    assert headers == [default_gguf] * 2
    assert files.path == default_gguf
    assert (card.name, card.max_positions) == ("SmolLM2-135M-Instruct", 8192)
    assert card.chat_template is not None
    assert "<|im_start|>" in card.chat_template
    assert card.default_sampling == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.model
def test_text_streams_in_whole_characters(default_gguf):
    tokenizer = load_card(*opened(default_gguf)).tokenizer
    text = "Grüße 👩‍👩‍👧‍👦 日本語\n  def f(): pass"
    stream = TextStream(tokenizer, SamplingParams())
    pieces = [stream.push([token]).text for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.push([], last=True).text == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.model
@pytest.mark.parametrize("skip", [False, True])
def test_decoding_matches_the_library(default_gguf, skip):
    """Random tokens, with special tokens and incomplete bytes, against the library's decoder."""
    tokenizer = load_card(*opened(default_gguf)).tokenizer
    assert tokenizer.byte_pieces(skip) is not None
    rng = Random(0)
    for _ in range(300):
        ids = [rng.choice([rng.randrange(400), rng.randrange(49152)]) for _ in range(40)]
        stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip))
        assert stream.push(ids, last=True).text == tokenizer.decode(ids, skip)


def first_layer(source: Path, path: Path) -> Path:
    """The default model reduced to one layer and 256 tokens, with unchanged bytes; loads quickly."""
    header = read_header(source)
    data = np.memmap(source, np.uint8, "r")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in header.metadata.items():
        if key.startswith("llama.") and key not in ("llama.block_count", "llama.vocab_size"):
            tiny.add_value(writer, key, value)
    writer.add_block_count(1)
    writer.add_vocab_size(256)
    for name, tensor in header.tensors.items():
        if name.startswith("blk.") and not name.startswith("blk.0."):
            continue
        raw = data[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = raw.reshape(tensor.shape[0], -1)[: 256 if name.startswith("token_embd") else None]
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        vector = len(tensor.shape) == 1
        writer.add_tensor(name, raw.view(np.float32) if vector else rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.model
def test_default_weights_match_transformers(default_gguf, tmp_path):
    path = first_layer(default_gguf, tmp_path / "one.gguf")
    network = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    state = network.state_dict()
    state.pop("lm_head.weight")
    cut, whole = GGUFCheckpoint(path), GGUFCheckpoint(default_gguf)
    assert set(state) == set(cut.names())
    for name, expected in state.items():
        shape = tuple(expected.shape)
        torch.testing.assert_close(cut.read(name, shape), expected)
        full_shape = whole.stored(name).shape
        part = whole.read(name, full_shape, (slice(0, shape[0]),))
        torch.testing.assert_close(part, expected)
