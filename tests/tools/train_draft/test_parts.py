"""Prompts, token logs, batches, acceptance, and checks of the target."""

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
from windlass.tools.train_draft.batches import epoch, make_batch, text_offsets
from windlass.tools.train_draft.corpus import Text
from windlass.tools.train_draft.eagle import draft_vocabulary, rope_config
from windlass.tools.train_draft.prompts import PromptGenerator, Renderer, read_prompts
from windlass.tools.train_draft.target import aux_layers, check_aux_hidden_states
from windlass.tools.train_draft.token_log import TokenLog
from windlass.tools.train_draft.training import schedule

CPU = torch.device("cpu")


def card_of(folder: Path, **changes: Any) -> ModelCard:
    config = ModelConfig(model=str(folder))
    card = load_card(resolve(config), config)
    values = {name: getattr(card, name) for name in ModelCard.__dataclass_fields__}
    return ModelCard(**values | changes)


def test_prompts_of_all_kinds_are_read_without_duplicates(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [
        {"prompt": "abcd"},
        {"text": "efgh"},
        {"messages": [{"role": "user", "content": "i"}, {"role": "assistant", "content": "no"}]},
        {"prompt": "abcd", "label": "again"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = card_of(model)
    found = read_prompts(path, Renderer(card), 20, skip_bad_lines=False)
    assert [card.tokenizer.decode(tokens) for tokens in found.tokens] == ["abcd", "ef", "[user]i"]
    assert found.notes == ("skipped 1 lines: duplicates",)


def test_a_conversation_needs_a_template(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "i"}]}\n')
    renderer = Renderer(card_of(model, chat_template=None))
    with pytest.raises(ConfigError, match="the model has no chat template"):
        read_prompts(path, renderer, 20, skip_bad_lines=False)
    with pytest.raises(ConfigError, match="cannot generate prompts"):
        PromptGenerator(renderer, bos_id=None, max_tokens=20, seed=0)


def test_generated_prompts_end_with_the_user_message(model: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    card = card_of(model, chat_template=template)
    generator = PromptGenerator(Renderer(card), bos_id=None, max_tokens=64, seed=0)
    assert card.tokenizer.decode(generator.opening) == "[user]"
    written = ["Hello[end][user]", "Hello[end]", "without an end", " [end]", "Why?[end]"]
    tokens = [card.tokenizer.encode(text) for text in written]
    found = [card.tokenizer.decode(each) for each in generator.prompts(tokens)]
    assert found == ["[user]Hello[end]", "[user]Why?[end]"]


def test_a_token_log_drops_only_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    log = TokenLog(path, {"seed": 1})
    log.add(3, [1, 2])
    log.add(5, [7])
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    again = TokenLog(path, {"seed": 1})
    assert again.found == {3: [1, 2]}
    again.add(5, [7])
    again.close()
    assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match="started with other options: seed was 1, is 2"):
        TokenLog(path, {"seed": 2})
    path.write_text("thesis\n")
    with pytest.raises(ConfigError, match="no file of train-draft"):
        TokenLog(path, {"seed": 1})


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = TokenLog(tmp_path / "texts.jsonl", {})
    log.add(0, [1])

    def full(file: int) -> None:
        del file
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EngineError, match=r"No space left on device\. 1 texts were generated"):
        log.flush()
    log.close()


def test_roots_and_labels_of_a_batch() -> None:
    texts = [Text(list(range(10, 18)), 3), Text(list(range(50, 55)), 2)]
    batch = make_batch(texts, text_offsets(texts), CPU)
    flat = batch.ids.flatten()
    assert batch.state_indices[:, 0].tolist() == [0, 8]
    # Labels: positions of the answer that a token follows; draft token 0 is the token after next.
    assert flat[batch.labels].tolist() == [13, 14, 15, 16, 52, 53]
    for j in range(3):
        counted = batch.is_counted(j)
        roots = batch.roots(j)[counted]
        assert torch.equal(flat[roots + 1 + j], flat[batch.labels[counted]])
        assert batch.weights(j)[counted].tolist() == pytest.approx([1 / len(roots)] * len(roots))
    assert flat[batch.roots(0)].tolist() == [12, 13, 14, 15, 51, 52]
    assert flat[batch.roots(2)[batch.is_counted(2)]].tolist() == [12, 13]


def test_an_epoch_has_every_text_once_and_is_deterministic() -> None:
    texts = [Text([0] * (5 + i % 40), 2) for i in range(100)]
    steps = list(epoch(texts, 256, 7, 1))
    assert sorted(id(text) for step in steps for text in step) == sorted(map(id, texts))
    assert steps == list(epoch(texts, 256, 7, 1))
    assert steps != list(epoch(texts, 256, 7, 2))
    assert all(make_batch(step, text_offsets(step), CPU).ids.numel() <= 256 for step in steps)


def test_acceptance_counts_draft_tokens_until_the_first_rejected() -> None:
    text = Text([9, 9, 1, 2, 3, 4, 5], 2)  # roots 1 .. 4

    class ScriptedHead:
        """Draft token 0 is always accepted, draft token 1 only if odd."""

        module = nn.Identity()
        num_draft_tokens = 2

        def draft(self, batch: Any, states: object) -> list[Tensor]:
            del states
            flat = batch.ids.flatten()
            first, second = (flat[batch.roots(j) + 2 + j] for j in range(2))
            return [first, torch.where(second % 2 == 1, second, 0)]

    target: Any = SimpleNamespace(device=CPU, offsets=text_offsets, states=lambda _batch: None)
    head: Any = ScriptedHead()
    found = measure(head, target, [text], 64)
    assert found.num_positions == 4
    assert found.by_position == [1.0, 2 / 3]  # second draft tokens are 3, 4 and 5
    assert found.mean_length == pytest.approx(1 + 1 + 2 / 3)
    # From root 1 three tokens (2, 3, then the target's 4); from root 4 one draft token and the end.
    assert walk(np.array([0, 2, 1, 2, 1, 0, 0]), text) == (2, 5)


def test_the_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    texts = [Text([5, 5, 5, 9, 9, 7], 3)]
    assert draft_vocabulary(texts, 2).tolist() == [7, 9]
    assert draft_vocabulary(texts, 5).tolist() == [0, 1, 2, 7, 9]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(3, (0, 1, 2)), (4, (1, 2, 3)), (6, (1, 3, 5)), (8, (2, 4, 5)), (30, (2, 15, 27))],
)
def test_there_are_three_aux_layers(layers: int, expected: tuple[int, ...]) -> None:
    hparams: Any = SimpleNamespace(num_layers=layers)
    assert aux_layers(hparams) == expected


def test_a_network_without_aux_hidden_states_is_refused() -> None:
    network: Any = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="NewForCausalLM does not return aux hidden states"):
        check_aux_hidden_states(network, "NewForCausalLM")


def test_the_learning_rate_warms_up_and_decays() -> None:
    rates = [schedule(share / 100) for share in range(101)]
    assert rates.index(max(rates)) == 5
    assert max(rates) == 1.0
    assert rates[0] < 0.2
    assert rates[-1] == pytest.approx(0.02)


def test_the_rope_config_round_trips(model: Path) -> None:
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
    rope = RopeConfig.from_hf(Fields(config, "here"), 16)
    written = {"max_position_embeddings": 512, **rope_config(rope)}
    assert RopeConfig.from_hf(Fields(written, "there"), 16) == rope
    plain = load_hparams(resolve(ModelConfig(model=str(model))), ModelConfig(model=str(model)))
    assert rope_config(plain.rope) == {"rope_theta": 10000.0}


def fingerprint_of(folder: Path, **options: Any) -> str:
    config = ModelConfig(model=str(folder), device="cpu", **options)
    files = resolve(config)
    return fingerprint(load_hparams(files, config), open_checkpoint(files, config))


def test_a_fingerprint_depends_on_the_model_not_the_file(model: Path, tmp_path: Path) -> None:
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
