"""Prompts, ledgers, batches, the measure of acceptance, and what a target must give."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from windlass.config import ModelConfig
from windlass.core.card import ModelCard
from windlass.errors import ConfigError, EngineError, UnsupportedError
from windlass.models.card import load_card, load_hparams, open_checkpoint
from windlass.models.fingerprint import fingerprint
from windlass.models.source import resolve
from windlass.tools.train_draft.acceptance import measure, walk
from windlass.tools.train_draft.batches import end_to_end, epoch, make_batch
from windlass.tools.train_draft.eagle import draft_vocabulary, rope_config
from windlass.tools.train_draft.ledger import Ledger
from windlass.tools.train_draft.prompts import Inventor, Renderer, read_prompts
from windlass.tools.train_draft.target import aux_layers, check_taps
from windlass.tools.train_draft.training import schedule
from windlass.tools.train_draft.writing import Text

CPU = torch.device("cpu")


def card_of(folder: Path, **changes: Any) -> ModelCard:
    config = ModelConfig(model=str(folder))
    card = load_card(resolve(config), config)
    values = {name: getattr(card, name) for name in ModelCard.__dataclass_fields__}
    return ModelCard(**values | changes)


def test_prompts_of_all_kinds_are_read_once_each(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "abcd"},
        {"text": "efgh"},
        {"messages": [{"role": "user", "content": "i"}, {"role": "assistant", "content": "no"}]},
        {"prompt": "abcd", "label": "again"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = card_of(model)
    found = read_prompts(path, Renderer(card), 20, False)
    assert [card.tokenizer.decode(tokens) for tokens in found.tokens] == ["abcd", "ef", "[user]i"]
    assert found.notes == ("1 lines left out: repetitions",)


def test_a_conversation_needs_a_template(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "i"}]}\n')
    renderer = Renderer(card_of(model, chat_template=None))
    with pytest.raises(ConfigError, match="the model has no chat template"):
        read_prompts(path, renderer, 20, False)
    with pytest.raises(ConfigError, match="cannot invent prompts"):
        Inventor.of(renderer, None, 20, 0)


def test_invented_words_end_where_the_turn_does(model: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    card = card_of(model, chat_template=template)
    inventor = Inventor.of(Renderer(card), None, 64, 0)
    assert card.tokenizer.decode(inventor.opening) == "[user]"
    written = ["Hello[end][user]", "Hello[end]", "without an end", " [end]", "Why?[end]"]
    tokens = [card.tokenizer.encode(text) for text in written]
    found = [card.tokenizer.decode(each) for each in inventor.prompts(tokens)]
    assert found == ["[user]Hello[end]", "[user]Why?[end]"]


def test_a_ledger_forgets_only_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    ledger = Ledger(path, {"seed": 1})
    ledger.add(3, [1, 2])
    ledger.add(5, [7])
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    again = Ledger(path, {"seed": 1})
    assert again.found == {3: [1, 2]}
    again.add(5, [7])
    again.close()
    assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match="begun with other options: seed was 1, is 2"):
        Ledger(path, {"seed": 2})
    path.write_text("thesis\n")
    with pytest.raises(ConfigError, match="no file of this program"):
        Ledger(path, {"seed": 1})


def test_a_ledger_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "texts.jsonl", {})
    ledger.add(0, [1])

    def full(file: int) -> None:
        del file
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match=r"No space left on device\. 1 texts were made"):
        ledger.flush()
    ledger.close()


def test_guesses_and_labels_are_where_the_text_says() -> None:
    texts = [Text(list(range(10, 18)), 3), Text(list(range(50, 55)), 2)]
    batch = make_batch(texts, end_to_end(texts), CPU)
    flat = batch.ids.flatten()
    assert batch.places[:, 0].tolist() == [0, 8]
    # Labels: positions of the answer where a token follows; guess 0 is for the token after next.
    assert flat[batch.labels].tolist() == [13, 14, 15, 16, 52, 53]
    for j in range(3):
        counted = batch.counts(j)
        places = batch.roots(j)[counted]
        assert torch.equal(flat[places + 1 + j], flat[batch.labels[counted]])
        assert batch.weights(j)[counted].tolist() == pytest.approx([1 / len(places)] * len(places))
    assert flat[batch.roots(0)].tolist() == [12, 13, 14, 15, 51, 52]
    assert flat[batch.roots(2)[batch.counts(2)]].tolist() == [12, 13]


def test_an_epoch_has_every_text_once_and_repeats_itself() -> None:
    texts = [Text([0] * (5 + i % 40), 2) for i in range(100)]
    steps = list(epoch(texts, 256, 7, 1))
    assert sorted(id(text) for step in steps for text in step) == sorted(map(id, texts))
    assert steps == list(epoch(texts, 256, 7, 1))
    assert steps != list(epoch(texts, 256, 7, 2))
    assert all(make_batch(step, end_to_end(step), CPU).ids.numel() <= 256 for step in steps)


def test_acceptance_counts_guesses_until_the_first_wrong_one() -> None:
    text = Text([9, 9, 1, 2, 3, 4, 5], 2)  # roots 1 .. 4

    class Knows:
        """Guess 0 is always right, guess 1 only for odd tokens."""

        module = nn.Identity()
        num_draft_tokens = 2

        def guess(self, batch: Any, states: object) -> list[Tensor]:
            del states
            flat = batch.ids.flatten()
            first, second = (flat[batch.roots(j) + 2 + j] for j in range(2))
            return [first, torch.where(second % 2 == 1, second, 0)]

    target: Any = SimpleNamespace(device=CPU, firsts=end_to_end, states=lambda _batch: None)
    head: Any = Knows()
    found = measure(head, target, [text], 64)
    assert found.num_positions == 4
    assert found.by_position == [1.0, 2 / 3]  # second guesses are 3, 4 and 5
    assert found.mean_length == pytest.approx(1 + 1 + 2 / 3)
    # From root 1 three tokens (2, 3, then the target's 4); from root 4 one guess and its end.
    assert walk(np.array([0, 2, 1, 2, 1, 0, 0]), text) == (2, 5)


def test_the_draft_vocabulary_is_what_answers_have_most() -> None:
    texts = [Text([5, 5, 5, 9, 9, 7], 3)]
    assert draft_vocabulary(texts, 2).tolist() == [7, 9]
    assert draft_vocabulary(texts, 5).tolist() == [0, 1, 2, 7, 9]


@pytest.mark.parametrize(
    ("layers", "aux_hidden_states"),
    [(3, (0, 1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (8, (2, 4, 5)), (30, (2, 15, 27))],
)
def test_taps_are_three_layers(layers: int, aux_hidden_states: tuple[int, ...]) -> None:
    spec: Any = SimpleNamespace(num_layers=layers)
    assert aux_layers(spec) == aux_hidden_states


def test_a_network_without_taps_is_refused() -> None:
    network: Any = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="NewForCausalLM does not give what enters"):
        check_taps(network, "NewForCausalLM")


def test_the_rate_rises_and_falls() -> None:
    rates = [schedule(share / 100) for share in range(101)]
    assert rates.index(max(rates)) == 5
    assert max(rates) == 1.0
    assert rates[0] < 0.2
    assert rates[-1] == pytest.approx(0.02)


def test_positions_are_described_as_others_read_them(model: Path) -> None:
    from windlass.models.fields import Fields
    from windlass.models.rope_config import RopeConfig

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = {"rope_theta": 500.0, "max_position_embeddings": 512, "rope_scaling": scaling}
    spec = RopeConfig.from_hf(Fields(config, "here"), 16)
    written = {"max_position_embeddings": 512, **rope_config(spec)}
    assert RopeConfig.from_hf(Fields(written, "there"), 16) == spec
    plain = load_hparams(resolve(ModelConfig(model=str(model))), ModelConfig(model=str(model)))
    assert rope_config(plain.rope) == {"rope_theta": 10000.0}


def fingerprint_of(folder: Path, **options: Any) -> str:
    config = ModelConfig(model=str(folder), device="cpu", **options)
    files = resolve(config)
    return fingerprint(load_hparams(files, config), open_checkpoint(files, config))


def test_a_fingerprint_is_the_models_not_the_files(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "wide"
    copy.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((model / name).read_bytes())
    tensors = {
        name: value.float() for name, value in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, copy / "model.safetensors")
    assert fingerprint_of(copy) == fingerprint_of(model)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors")
    assert fingerprint_of(copy) != fingerprint_of(model)
    dummies = {fingerprint_of(model, load_format="dummy", seed=seed) for seed in (0, 0, 1)}
    assert len(dummies) == 2
