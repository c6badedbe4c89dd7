"""Tokenizers against their originals: transformers for the default model, sentencepiece, tokenizers."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.cohere.tokenization_cohere import CohereTokenizer
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.gpt_neox.tokenization_gpt_neox import GPTNeoXTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from tests.conftest import faster_gguf
from tests.models import texts, tiny
from tests.models.tokenizer_strings import GROUPS, STRINGS
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models import gguf_tokenizer, spm, tokenizer_files
from windlass.models.gguf_header import read_header
from windlass.models.pre_tokenizers import PRE_TOKENIZERS
from windlass.models.tokenizer import HFTokenizer

TEXTS = texts.diverse()  # small vocabularies are trained on these


def hf(side) -> HFTokenizer:
    return HFTokenizer(side.backend, side.eos_ids)


# --- the default model


@pytest.fixture(scope="session")
def default_tokenizer(default_gguf):
    return hf(gguf_tokenizer.load_text(read_header(default_gguf)))


@pytest.fixture(scope="session")
def original(default_gguf):
    """transformers' own conversion, which leaves out that SmolLM takes digits one by one."""
    with faster_gguf():
        found = AutoTokenizer.from_pretrained(default_gguf.parent, gguf_file=default_gguf.name)
    backend = found.backend_tokenizer
    unchanged = Tokenizer.from_str(backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return backend, unchanged


@pytest.mark.model
def test_default_ids_are_those_of_transformers(default_tokenizer, original):
    corrected, unchanged = original
    for text in TEXTS + STRINGS + texts.SPECIAL:
        ids = default_tokenizer.encode(text)
        assert ids == corrected.encode(text).ids, text
        assert default_tokenizer.decode(ids) == corrected.decode(ids), text
        if not any(char.isnumeric() for char in text):
            assert ids == unchanged.encode(text).ids, text
    for add_special in (True, False):
        singly = [default_tokenizer.encode(text, add_special) for text in TEXTS]
        assert default_tokenizer.encode_all(TEXTS, add_special) == singly


@pytest.mark.model
def test_default_text_survives_the_round_trip(default_tokenizer):
    for text in TEXTS:  # the vocabulary lacks some control characters, which STRINGS have
        ids = default_tokenizer.encode(text)
        assert default_tokenizer.decode(ids) == text
        assert b"".join(map(default_tokenizer.token_bytes, ids)) == text.encode()
    for text in texts.SPECIAL:
        assert default_tokenizer.decode(default_tokenizer.encode(text), skip_special=False) == text


@pytest.mark.model
def test_default_special_tokens(default_tokenizer, default_gguf):
    side = gguf_tokenizer.load_text(read_header(default_gguf))
    assert side.special_tokens["bos_token"] == "<|im_start|>"
    assert default_tokenizer.eos_ids == (2,)
    assert default_tokenizer.decode([2, 19556], skip_special=True) == "Hello"
    assert default_tokenizer.token_text(2) == "<|im_end|>"
    assert default_tokenizer.encode("Hello") == default_tokenizer.encode("Hello", add_special=False)
    assert default_tokenizer.vocab_size == 49152


@pytest.mark.model
def test_ids_outside_the_vocabulary_decode_to_nothing(default_tokenizer):
    assert default_tokenizer.decode([19556, 49152, -1, 10**12]) == "Hello"
    assert default_tokenizer.token_bytes(10**12) == default_tokenizer.token_bytes(-1) == b""


# --- byte-level BPE out of a GGUF

SPECIALS = ["<|end_of_text|>", "<|eot_id|>"]


def byte_level(pre: pre_tokenizers.PreTokenizer, normalizer=None, **options) -> Tokenizer:
    """A small byte-level tokenizer, trained on the texts that it is compared on."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.model.ignore_merges = options.get("ignore_merges", False)
    return backend


def bpe_metadata(backend: Tokenizer, pre: str | None, **changes) -> dict:
    model = json.loads(backend.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3 if piece in SPECIALS else 1 for piece in pieces],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def from_gguf(path: Path, metadata: dict):
    return gguf_tokenizer.load_text(
        read_header(tiny.write_gguf(path, metadata=tiny.TOKENIZER | metadata))
    )


def split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    from tokenizers import Regex

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# As the models' own tokenizer.json files have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("pre", "pre_tokenizer", "normalizer"),
    [
        ("smollm", pre_tokenizers.Sequence([DIGITS, GPT2]), None),
        ("starcoder", pre_tokenizers.Sequence([DIGITS, GPT2]), None),
        ("refact", pre_tokenizers.Sequence([DIGITS, GPT2]), None),
        ("gpt-2", GPT2, None),
        ("olmo", GPT2, normalizers.NFC()),
        ("qwen2", split_then_bytes(QWEN2), normalizers.NFC()),
        ("stablelm2", split_then_bytes(QWEN2), normalizers.NFC()),
        ("hunyuan", split_then_bytes(QWEN2), normalizers.NFC()),
        ("llama-bpe", split_then_bytes(LLAMA3), None),
        ("glm4", split_then_bytes(LLAMA3), None),
    ],
)
def test_byte_level_ids_are_those_of_the_original(tmp_path, pre, pre_tokenizer, normalizer):
    original = byte_level(pre_tokenizer, normalizer, ignore_merges=pre in ("llama-bpe", "glm4"))
    rebuilt = hf(from_gguf(tmp_path / "m.gguf", bpe_metadata(original, pre)))
    for text in [*TEXTS, *STRINGS, "a<|eot_id|>b <|eot_id|>"]:
        assert rebuilt.encode(text, add_special=False) == original.encode(text).ids, text
    assert (rebuilt.encode("x")[0] == 0) == (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("pre", "original_class"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("mpt", GPTNeoXTokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_byte_level_ids_equal_the_transformers_class(tmp_path, pre, original_class):
    trained = byte_level(GPT2)
    model = json.loads(trained.to_str())["model"]
    original = original_class(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])
    rebuilt = hf(from_gguf(tmp_path / "m.gguf", bpe_metadata(trained, pre)))
    for text in [*TEXTS, *STRINGS]:
        expected = original.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert rebuilt.encode(text, add_special=False) == expected, ascii(text)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_combining_marks_are_normalised_as_in_the_original(tmp_path, pre):
    tokenizer = hf(from_gguf(tmp_path / "m.gguf", bpe_metadata(byte_level(GPT2), pre)))
    composed, apart = (tokenizer.encode(text, False) for text in ("caf\u00e9", "cafe\u0301"))
    assert (composed == apart) == PRE_TOKENIZERS[pre].nfc
    assert tokenizer.decode(apart) == ("caf\u00e9" if PRE_TOKENIZERS[pre].nfc else "cafe\u0301")


def test_the_documented_table_is_the_one_in_use():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.split("### Byte-level BPE")[1].split("\n### ")[0]
    documented = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`") and cells[1] != "models":
            for name in cells[0].replace("`", "").split(", "):
                documented[name] = (cells[2] == "NFC", cells[4] == "yes")
    assert documented == {name: (row.nfc, row.add_bos) for name, row in PRE_TOKENIZERS.items()}


def test_kimi_keeps_chinese_characters_apart_from_other_letters(tmp_path):
    side = from_gguf(tmp_path / "m.gguf", bpe_metadata(byte_level(GPT2), "kimi-k2"))
    text = "Hello\u4e2d\u6587\u304b\u306a 1234 we're"
    spans = [span for _, span in side.backend.pre_tokenizer.pre_tokenize_str(text)]
    pieces = [text[start:end] for start, end in spans]
    assert pieces == ["Hello", "\u4e2d\u6587", "\u304b\u306a", " ", "123", "4", " we're"]


def test_the_default_scheme_cuts_punctuation_and_threes(tmp_path):
    side = from_gguf(tmp_path / "m.gguf", bpe_metadata(byte_level(GPT2), "default"))
    pieces = [text for text, _ in side.backend.pre_tokenizer.pre_tokenize_str("f(n): 12345 ok!?")]
    assert pieces == ["f", "(", "n", "):", "Ġ", "123", "45", "Ġok", "!?"]


def test_bos_and_eos_follow_the_file(tmp_path):
    metadata = bpe_metadata(byte_level(GPT2), "gpt-2", add_bos_token=True, add_eos_token=True)
    tokenizer = hf(from_gguf(tmp_path / "m.gguf", metadata | {"tokenizer.ggml.eos_token_id": 1}))
    assert tokenizer.encode("x")[0] == 0
    assert tokenizer.encode("x")[-1] == 1
    assert len(tokenizer.encode("x", add_special=False)) == len(tokenizer.encode("x")) - 2


def test_a_chat_model_also_ends_at_its_templates_end_of_turn(tmp_path):
    metadata = bpe_metadata(byte_level(GPT2), "gpt-2")
    assert from_gguf(tmp_path / "a.gguf", metadata).eos_ids == (0,)
    metadata["tokenizer.chat_template"] = "{{ messages }}<|eot_id|>"
    assert from_gguf(tmp_path / "b.gguf", metadata).eos_ids == (0, 1)
    del metadata["tokenizer.chat_template"]
    metadata["tokenizer.ggml.eot_token_id"] = 1
    assert from_gguf(tmp_path / "c.gguf", metadata).eos_ids == (0, 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pre": "wordy"}, UnsupportedError, "'wordy' is not known"),
        ({"pre": "wordy"}, UnsupportedError, ", ".join(PRE_TOKENIZERS)),
        ({"pre": None}, UnsupportedError, "no pre-tokenizer is named"),
        ({"model": "t5"}, UnsupportedError, "'t5' is not known"),
        ({"tokens": None}, CheckpointError, "tokens is missing"),
        ({"token_type": [1, 1]}, CheckpointError, "token_type is not a list of"),
        ({"merges": ["a nowhere"]}, CheckpointError, "merge 'a nowhere'"),
        ({"model": "llama"}, CheckpointError, "scores is missing"),
    ],
)
def test_invalid_tokenizers_are_rejected_by_name(tmp_path, changes, error, message):
    metadata = bpe_metadata(byte_level(GPT2), **({"pre": "gpt-2"} | changes))
    with pytest.raises(error, match=r"m\.gguf") as caught:
        from_gguf(tmp_path / "m.gguf", metadata)
    assert message in str(caught.value)


# --- SentencePiece

# The library ends a text at a zero byte, and does not look for control tokens in it.
SENTENCES = [
    text
    for text in TEXTS + STRINGS
    if "\0" not in text and text not in GROUPS["special-token-like"]
]


def train_sentence_piece(path: Path, **options) -> Path:
    """A tokenizer.model with Llama's settings, trained on the texts."""
    model = io.BytesIO()
    lines = [text for text in TEXTS if text.strip() and "\0" not in text]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=1100,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def sentence_model(tmp_path_factory) -> Path:
    return train_sentence_piece(tmp_path_factory.mktemp("spm") / "tokenizer.model")


def spm_metadata(vocabulary: spm.Vocabulary) -> dict:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary.pieces,
        "tokenizer.ggml.scores": [float(score) for score in vocabulary.scores],
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_ids_are_those_of_sentencepiece(tmp_path, sentence_model, kind):
    if kind == "folder":
        tokenizer = hf(tokenizer_files.load_text(sentence_model.parent))
    else:
        metadata = spm_metadata(spm.read_model(sentence_model))
        tokenizer = hf(from_gguf(tmp_path / "m.gguf", metadata))
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentence_model))
    assert tokenizer.eos_ids == (2,)
    for text in SENTENCES:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original.encode(text), text
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(b" ") == text.encode()
    assert tokenizer.encode("x") == [1, *original.encode("x")]


def test_runs_of_spaces_that_a_gguf_writes_as_spaces_are_found(tmp_path):
    """Gemma's vocabulary: no prefix, and user-defined pieces for runs of spaces."""
    runs = ["\u2581" * length for length in range(2, 9)]
    path = train_sentence_piece(
        tmp_path / "tokenizer.model", user_defined_symbols=runs, add_dummy_prefix=False
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    metadata = spm_metadata(spm.read_model(path)) | {"tokenizer.ggml.add_space_prefix": False}
    pieces = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [
        piece.replace("\u2581", " ") if piece in runs else piece for piece in pieces
    ]
    tokenizer = hf(from_gguf(tmp_path / "m.gguf", metadata))
    assert tokenizer.encode("a    b", add_special=False) == original.encode("a    b")
    for text in SENTENCES:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original.encode(text), ascii(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_merges_of_a_gemma4_file_are_used(tmp_path, sentence_model):
    """The scores of such files are all alike; the order of the merges says which goes first."""
    vocabulary = spm.read_model(sentence_model)
    metadata = spm_metadata(vocabulary)
    merges = json.loads(spm.build(vocabulary).to_str())["model"]["merges"]
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": [-1000.0] * len(vocabulary.pieces),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    tokenizer = hf(from_gguf(tmp_path / "m.gguf", metadata))
    without_prefix = spm.build(replace(vocabulary, add_space_prefix=False))
    for text in SENTENCES:
        expected = without_prefix.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False) == expected, ascii(text)


def test_special_tokens_of_phi3_swallow_the_whitespace_after_them(tmp_path, sentence_model):
    metadata = spm_metadata(spm.read_model(sentence_model)) | {"general.architecture": "phi3"}
    metadata["tokenizer.ggml.tokens"].append("<|end|>")
    metadata["tokenizer.ggml.scores"].append(-1000.0)
    metadata["tokenizer.ggml.token_type"].append(3)
    other = hf(from_gguf(tmp_path / "m.gguf", metadata | {"general.architecture": "llama"}))
    phi3 = hf(from_gguf(tmp_path / "p.gguf", metadata))
    assert phi3.encode("a<|end|> \nb") == phi3.encode("a<|end|>b") == other.encode("a<|end|>b")
    assert phi3.encode("<s> b") == other.encode("<s> b") != phi3.encode("<s>b")


def test_bos_and_eos_around_sentencepiece_are_a_setting(tmp_path, sentence_model):
    (tmp_path / "tokenizer.model").write_bytes(sentence_model.read_bytes())
    settings = {"add_bos_token": False, "add_eos_token": True}
    tiny.write_json(tmp_path / "tokenizer_config.json", settings)
    ids = hf(tokenizer_files.load_text(tmp_path)).encode("x")
    assert ids[0] != 1
    assert ids[-1] == 2


def test_the_protobuf_is_read_as_sentencepiece_reads_it(sentence_model):
    vocabulary = spm.read_model(sentence_model)
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentence_model))
    size = original.get_piece_size()
    assert vocabulary.pieces == [original.id_to_piece(token) for token in range(size)]
    assert vocabulary.scores == [original.get_score(token) for token in range(size)]
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id) == (1, 2, 0)


def test_a_corrupt_tokenizer_model_is_rejected(tmp_path, sentence_model):
    path = tmp_path / "tokenizer.model"
    data = sentence_model.read_bytes()
    for content in (data[: len(data) // 2], b"\xff" * 64, b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.model: is not a SentencePiece"):
            spm.read_model(path)


def test_other_sentencepiece_models_are_rejected(tmp_path):
    path = tmp_path / "tokenizer.model"
    for options, message in (
        ({"model_type": "unigram"}, "only BPE"),
        ({"model_type": "bpe"}, "normalises text"),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["some words to learn from"] * 9),
            model_writer=model,
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        path.write_bytes(model.getvalue())
        with pytest.raises(UnsupportedError, match=message):
            spm.read_model(path)


# --- folders


@pytest.fixture
def folder(tmp_path) -> Path:
    byte_level(GPT2).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|end_of_text|>", "eos_token": "<|eot_id|>"},
        {"add_eos_token": True, "eos_token": {"content": "<|eot_id|>", "__type": "AddedToken"}},
        {"add_bos_token": False, "bos_token": "<|end_of_text|>"},
        {
            "added_tokens_decoder": {
                "900": {
                    "content": "<tool>",
                    "special": True,
                    "lstrip": False,
                    "rstrip": False,
                    "single_word": False,
                    "normalized": False,
                }
            }
        },
    ],
)
def test_a_folder_is_read_as_transformers_reads_it(folder, settings):
    named = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tiny.write_json(folder / "tokenizer_config.json", named)
    tokenizer = hf(tokenizer_files.load_text(folder))
    original = AutoTokenizer.from_pretrained(folder)
    for text in ["", "Hello 123", "a <tool> b<|eot_id|>"]:
        assert tokenizer.encode(text) == original(text)["input_ids"]
        ids = tokenizer.encode(text, add_special=False)
        assert ids == original(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_ids == ((1,) if "eos_token" in settings else ())


def test_truncation_in_the_file_is_switched_off(folder):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer, texts = hf(tokenizer_files.load_text(folder)), ["one two three four five", "six"]
    assert 4 < len(tokenizer.encode(texts[0])) < 50
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_all([]) == []


def test_chat_templates_are_found_in_every_file(folder):
    assert tokenizer_files.chat_template(folder) is None
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tiny.write_json(folder / "tokenizer_config.json", {"chat_template": several})
    assert tokenizer_files.chat_template(folder) == "D"
    tiny.write_json(folder / "tokenizer_config.json", {"chat_template": "S"})
    assert tokenizer_files.chat_template(folder) == "S"
    tiny.write_json(folder / "chat_template.json", {"chat_template": "J"})
    assert tokenizer_files.chat_template(folder) == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert tokenizer_files.chat_template(folder) == "F"


def test_invalid_tokenizer_folders_are_rejected(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        tokenizer_files.load_text(empty)
    (empty / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tekken\.json that is there"):
        tokenizer_files.load_text(empty)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
        tokenizer_files.load_text(folder)
    (folder / "tokenizer.txt").write_text("")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.txt: is not a tokenizer"):
        tokenizer_files.load_text(folder / "tokenizer.txt")


@pytest.mark.model
def test_long_texts_use_the_calls_that_release_the_gil(default_tokenizer):
    text = " ".join(TEXTS) * 20
    assert len(text) > 5000
    ids = default_tokenizer.encode(text)
    with mock.patch.object(type(default_tokenizer), "encode", side_effect=AssertionError):
        assert default_tokenizer.encode_all([text]) == [ids]
    assert len(ids) > 2000
    assert default_tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.model
def test_max_token_chars_bounds_every_token(default_tokenizer):
    lengths = [
        len(default_tokenizer.token_text(token)) for token in range(default_tokenizer.vocab_size)
    ]
    assert default_tokenizer.max_token_chars >= max(lengths)


# --- tokens for filling in the middle


def fim_gguf(path: Path, **metadata: object):
    return gguf_tokenizer.load_text(
        read_header(tiny.write_gguf(path, metadata=tiny.TOKENIZER | metadata))
    ).fim


def test_fim_tokens_of_a_gguf_are_those_of_its_metadata_or_its_vocabulary(tmp_path):
    assert fim_gguf(tmp_path / "none.gguf") is None
    ids = {
        f"tokenizer.ggml.fim_{part}_token_id": i for i, part in enumerate(("pre", "suf", "mid"), 5)
    }
    fim = fim_gguf(tmp_path / "ids.gguf", **ids)
    assert (fim.prefix, fim.suffix, fim.middle, fim.stop) == (5, 6, 7, ())
    old = {
        f"tokenizer.ggml.{part}_token_id": i
        for i, part in enumerate(("prefix", "suffix", "middle"), 8)
    }
    fim = fim_gguf(tmp_path / "old.gguf", **old)
    assert (fim.prefix, fim.suffix, fim.middle) == (8, 9, 10)
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>"]
    tokens = [*tiny.TOKENIZER["tokenizer.ggml.tokens"][: -len(names)], *names]
    fim = fim_gguf(tmp_path / "names.gguf", **{"tokenizer.ggml.tokens": tokens})
    at = len(tokens) - len(names)
    assert (fim.prefix, fim.middle, fim.suffix, fim.file) == (at, at + 1, at + 2, at + 4)
    assert fim.stop == (at + 4, at + 3)


def test_fim_tokens_of_a_folder_are_those_that_its_config_names(tmp_path):
    vocab = {"a": 0, "[P]": 1, "[S]": 2, "[M]": 3, "<PRE>": 4, "<SUF>": 5, "<MID>": 6}
    Tokenizer(models.BPE(vocab, [])).save(str(tmp_path / "tokenizer.json"))
    fim = tokenizer_files.load_text(tmp_path).fim
    assert (fim.prefix, fim.suffix, fim.middle) == (4, 5, 6)
    named = {"prefix_token": "[P]", "suffix_token": {"content": "[S]"}, "middle_token": "[M]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    fim = tokenizer_files.load_text(tmp_path).fim
    assert (fim.prefix, fim.suffix, fim.middle) == (1, 2, 3)
