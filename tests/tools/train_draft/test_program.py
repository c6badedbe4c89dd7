"""The whole command: its files, interruptions, and invalid options."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.quantize.conftest import write_model
from tests.tools.train_draft.conftest import EAGLE, MEDUSA, ONE_CORE, TrainDraft, full_disk
from windlass.tools import resumable


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_an_eagle_head_is_written_in_the_public_layout(
    tmp_path: Path, train_draft: TrainDraft
) -> None:
    out = tmp_path / "head"
    printed = train_draft(out, *EAGLE)
    assert "mean acceptance length" in printed
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64
    assert config["num_hidden_layers"] == 1
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["windlass"]["target"] == "tiny"
    assert len(config["windlass"]["target_fingerprint"]) == 32
    tensors = load_file(out / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["lm_head.weight"].shape == (64, 64)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].sum() == 64
    assert tensors["t2d"][torch.arange(64) + tensors["d2t"]].all()
    _check_report(report_of(out), 3)
    assert not (tmp_path / "head.partial").exists()


def test_medusa_heads_are_written_in_the_public_layout(
    tmp_path: Path, train_draft: TrainDraft
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    texts = tmp_path / "texts.jsonl"
    train_draft(shared, "--texts", texts, *MEDUSA)
    written = texts.read_bytes()
    options = (*MEDUSA, "--no-share-head")
    train_draft(own, "--texts", texts, *options)
    assert texts.read_bytes() == written  # the answers are reused
    config = json.loads((shared / "config.json").read_text())
    assert config["medusa_num_heads"] == 2
    assert config["medusa_num_layers"] == 1
    assert "draft_vocab_size" not in config
    tensors = load_file(shared / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == {
        "0.0.linear.weight": (64, 64),
        "0.0.linear.bias": (64,),
        "1.0.linear.weight": (64, 64),
        "1.0.linear.bias": (64,),
    }
    tensors = load_file(own / "model.safetensors")
    assert tensors["1.1.weight"].shape == (256, 64)
    assert "d2t" not in tensors
    for folder in (shared, own):
        _check_report(report_of(folder), 2)


def _check_report(report: dict[str, Any], num_draft_tokens: int) -> None:
    held = report["held_out"]
    shares = held["acceptance_by_position"]
    assert len(shares) == num_draft_tokens
    assert all(0 <= share <= 1 for share in shares)
    assert held["mean_acceptance_length"] == pytest.approx(1 + sum(shares), abs=1e-3)
    assert 1 <= held["walk_acceptance_length"] <= 1 + num_draft_tokens
    assert report["texts"]["held_out"] == held["texts"] == 1
    curve = report["training"]["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert report["training"]["ended_by"] == "--epochs 8"


# The command, which kills itself when it has saved its state for the second time.
_KILLED = """
import os, signal
from windlass.cli.main import app
from windlass.tools.train_draft.output import TrainingOutput

save, times = TrainingOutput.save_state, []

def save_and_die(self, *args):
    save(self, *args)
    times.append(1)
    if len(times) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

TrainingOutput.save_state = save_and_die
app()
"""


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_the_same(
    model: Path, prompts: Path, tmp_path: Path, train_draft: TrainDraft
) -> None:
    options = (*EAGLE, "--max-steps", "9", "--save-every", "3")
    train_draft(tmp_path / "whole", *options)
    out = tmp_path / "out"
    words = ["train-draft", str(model), "-o", str(out), "--data", str(prompts), *options, *ONE_CORE]
    killed = subprocess.run([sys.executable, "-c", _KILLED, *words], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists()
    other = train_draft(out, *options, "--lr", "0.5", code=2)
    assert "begun with other options: lr was" in other
    assert "trained 9 steps" in train_draft(out, *options)
    assert same_tensors(tmp_path / "whole", out)
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_keeps_finished_work(
    tmp_path: Path,
    train_draft: TrainDraft,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = (*EAGLE, "--max-steps", "8", "--save-every", "3")
    real, out = resumable.write_durably, tmp_path / "out"
    writes: list[str] = []
    full = full_disk(writes, lambda w: w.count("state.safetensors") == 1)
    monkeypatch.setattr(resumable, "write_durably", full)
    printed = train_draft(out, *options, code=1)
    assert "The texts are kept, and no training state is saved yet." in " ".join(printed.split())
    writes.clear()
    monkeypatch.setattr(resumable, "write_durably", real)
    full = full_disk(writes, lambda w: w.count("state.safetensors") == 2 or w[-1] == "report.json")
    monkeypatch.setattr(resumable, "write_durably", full)
    printed = train_draft(out, *options, code=1)
    assert "No space left on device" in printed
    assert "The texts and the training up to step 3 are kept in" in printed
    assert "run the same command again" in " ".join(printed.split())
    assert not out.exists()
    writes += ["state.safetensors"] * 2
    printed = train_draft(out, *options, code=1)
    assert "The texts and the training up to step 8 are kept in" in printed
    assert not out.exists()
    monkeypatch.setattr(resumable, "write_durably", real)
    assert "trained 8 steps" in train_draft(out, *options)
    assert (out / "report.json").is_file()


def test_a_time_limit_ends_the_training_and_writes_the_head(
    tmp_path: Path, train_draft: TrainDraft
) -> None:
    out = tmp_path / "out"
    train_draft(out, *MEDUSA, "--time-limit", "0.0001")
    assert report_of(out)["training"]["ended_by"] == "--time-limit 0.0001"


def test_the_model_generates_prompts(tmp_path: Path, train_draft: TrainDraft) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=4)
    out = tmp_path / "out"
    printed = train_draft(out, *MEDUSA, "--prompts", 12, "--max-steps", 2, model=folder, data=None)
    assert "texts: 11 to train on" in printed
    assert report_of(out)["data"] == "invented by the model"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kind", "magic"), "--kind must be medusa or eagle"),
        (("--kind", "eagle", "--unroll", "0"), "--unroll must be between 1 and 16, got 0"),
        (("--kind", "eagle", "--unroll", "1000"), "--unroll must be between 1 and 16"),
        (("--kind", "medusa", "--heads", "0"), "--heads must be between 1 and 16"),
        (("--kind", "medusa", "--unroll", "2"), "--unroll is for --kind eagle"),
        (("--kind", "eagle", "--heads", "2"), "--heads is for --kind medusa"),
        (("--kind", "eagle", "--draft-vocab", "257"), "257 is more than the 256 tokens"),
        (("--kind", "medusa", "--draft-vocab", "64"), "Add --no-share-head to train one per head"),
        (
            ("--kind", "medusa", "--no-share-head", "--draft-vocab", "257"),
            "257 is more than the 256 tokens",
        ),
        (("--kind", "eagle", "--context", "1024"), "more than the model's 512 positions"),
        (("--kind", "eagle", "--context", "64"), "--max-tokens must be between 4 and 63"),
        (("--kind", "eagle", "--lr", "0"), "--lr must be above 0"),
        (("--kind", "medusa", "--time-limit", "0"), "--time-limit must be above 0"),
        (("--kind", "medusa", "--prompts", "1"), "--prompts must be between 2 and"),
    ],
)
def test_invalid_options_are_refused(
    flags: tuple[str, ...],
    words: str,
    tmp_path: Path,
    train_draft: TrainDraft,
) -> None:
    printed = train_draft(tmp_path / "out", *flags, code=2)
    assert words in printed
    assert not (tmp_path / "out").exists()


def test_files_without_usable_prompts_are_refused(tmp_path: Path, train_draft: TrainDraft) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    lines = ['{"question": "?"}', "not json", '{"messages": []}', '{"prompt": "' + "a" * 99 + '"}']
    data.write_text("\n".join(lines))
    flags = ("--skip-broken-lines", *MEDUSA)
    printed = " ".join(train_draft(out, *flags, data=data, code=2).split())
    assert "0 usable prompts" in printed
    assert "1 lines: needs one of prompt, messages and text" in printed
    assert "1 lines: is not JSON" in printed
    assert "of more than 24 tokens" in printed
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": 3}\n')
    printed = train_draft(out, *MEDUSA, data=data, code=2)
    assert "line 3: prompt must be a non-empty string" in printed
    data.write_text("")
    assert "Other lines: none" in train_draft(out, *MEDUSA, data=data, code=2)
    gone = tmp_path / "gone.jsonl"
    assert "No such file" in train_draft(out, *MEDUSA, data=gone, code=2)


def test_an_output_that_exists_is_refused(tmp_path: Path, train_draft: TrainDraft) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert "exists already" in train_draft(out, *EAGLE, code=2)
    mine = tmp_path / "new.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    printed = train_draft(tmp_path / "new", *EAGLE, code=2)
    assert "holds other files (thesis.txt)" in printed


def test_eagle_needs_three_layers(tmp_path: Path, train_draft: TrainDraft) -> None:
    folder = write_model(tmp_path / "two", num_hidden_layers=2)
    printed = train_draft(tmp_path / "out", *EAGLE, model=folder, code=2)
    assert "reads the inputs of three layers, and this model has 2" in printed
