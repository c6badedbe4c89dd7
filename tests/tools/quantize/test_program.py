"""Interrupted runs and invalid input of `windlass quantize`."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.quantize.conftest import CONFIG, Quantize, tiny_tensors, write_model
from windlass.tools import resumable

GPTQ = ("--method", "gptq", "--bits", "4", "--group-size", "32", "--sample-tokens", "64")


# The command, with slow layers from the second on, so that the test can kill it within one.
_SLOW = """
import time
from windlass.cli.main import app
from windlass.tools.quantize.layer import Layer

collect = Layer.collect
Layer.collect = lambda self, hidden: (time.sleep(30 * (self.index > 0)), collect(self, hidden))[1]
app()
"""


def test_killed_run_resumes_with_the_same_result(
    model: Path, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    options = (*GPTQ, "--calibration", str(texts), "--samples", "16")
    quantize(model, "-o", tmp_path / "whole", *options)
    out, work = tmp_path / "out", tmp_path / "out.partial"
    command = [sys.executable, "-c", _SLOW, "quantize", str(model), "-o", str(out), *options]
    process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE)
    manifest = work / "manifest.json"
    while not (manifest.is_file() and json.loads(manifest.read_text())["layers"]):
        assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    other = quantize(model, "-o", out, *options[:-1], "17", "--alpha", "0.25", code=2)
    assert (
        "begun with other options: alpha was 0.5, is 0.25; samples was 16, is 17; tokens was"
        in other
    )
    assert "resuming after 1 layers" in quantize(model, "-o", out, *options)
    assert not work.exists()
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_full_disk_keeps_finished_layers(
    model: Path,
    texts: Path,
    tmp_path: Path,
    quantize: Quantize,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = (*GPTQ, "--calibration", texts, "--samples", "16")
    real, out = resumable.write_durably, tmp_path / "out"

    def full(path: Path, data: bytes) -> None:
        if path.name == "layer-00002.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(resumable, "write_durably", full)
    output = quantize(model, "-o", out, *options, code=1)
    assert "No space left on device. 2 of 3 layers are done and saved in" in output
    assert not out.exists()
    monkeypatch.setattr(resumable, "write_durably", real)
    assert "resuming after 2 layers" in quantize(model, "-o", out, *options)
    assert (out / "config.json").is_file()

    def full_at_the_end(path: Path, data: bytes) -> None:
        if path.name == "model.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(resumable, "write_durably", full_at_the_end)
    other = tmp_path / "other"
    assert "3 of 3 layers are done" in quantize(model, "-o", other, *options, code=1)
    assert not other.exists()
    monkeypatch.setattr(resumable, "write_durably", real)
    quantize(model, "-o", other, *options)
    assert (other / "model.safetensors").is_file()


def test_existing_output_is_refused(model: Path, tmp_path: Path, quantize: Quantize) -> None:
    out = tmp_path / "out"
    out.mkdir()
    quantize(model, "-o", out, "--method", "rtn")
    assert "exists already" in quantize(model, "-o", out, "--method", "rtn", code=2)
    file = tmp_path / "file"
    file.write_text("mine")
    mine = tmp_path / "new.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    output = quantize(model, "-o", tmp_path / "new", "--method", "rtn", code=2)
    assert "holds other files (thesis.txt)" in output
    assert "exists already" in quantize(model, "-o", file, "--method", "rtn", code=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--method", "magic"), "--method must be one of rtn, gptq"),
        (("--method", "gptq"), "needs --calibration"),
        (("--method", "rtn", "--group-size", "128"), "128 does not divide the 64 inputs of"),
        (("--method", "rtn", "--group-size", "128"), "Sizes that fit all layers: 64, 32, -1"),
        (("--method", "rtn", "--group-size", "48"), "must be a power of two"),
        (("--method", "nf4", "--group-size", "-1"), "from 8 on with --method nf4; got -1"),
        (("--method", "nf4", "--group-size", "128"), "Sizes that fit all layers: 64, 32."),
        (("--method", "fp8", "--group-size", "64"), "does not go with --method fp8"),
        (("--method", "fp8", "--scales", "block"), "blocks of 128 do not divide the 64 inputs"),
        (("--method", "rtn", "--scales", "block"), "is for --method fp8"),
        (("--method", "fp8", "--bits", "4"), "--bits 4 does not go with --method fp8; possible: 8"),
        (("--method", "rtn", "--bits", "8", "--format", "awq"), "use --format compressed-tensors"),
        (("--method", "rtn", "--bits", "3", "--format", "awq"), "use --format gptq"),
        (("--method", "nf4", "--format", "gptq"), "only written as --format bitsandbytes"),
        (("--method", "rtn", "--format", "bitsandbytes"), "is for --method nf4"),
        (("--method", "smoothquant", "--asymmetric"), "needs --calibration"),
        (("--method", "fp8", "--asymmetric"), "--asymmetric does not go with"),
        (("--method", "rtn", "--act-order", "static"), "--act-order is for --method gptq"),
        (("--method", "rtn", "--damping", "0"), "--damping must be above 0"),
    ],
)
def test_conflicting_options_are_refused(
    flags: tuple[str, ...], words: str, model: Path, tmp_path: Path, quantize: Quantize
) -> None:
    assert words in quantize(model, "-o", tmp_path / "out", *flags, code=2)
    assert list(tmp_path.iterdir()) == []


def test_model_is_required(tmp_path: Path, quantize: Quantize) -> None:
    assert "MODEL is missing" in quantize("-o", tmp_path / "out", "--method", "rtn", code=2)


def lines(path: Path, *records: object) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    path.write_text(text)
    return path


def test_invalid_calibration_files(
    model: Path, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    def refused(file: Path, *flags: object) -> str:
        return quantize(model, "-o", tmp_path / "o", *GPTQ, "--calibration", file, *flags, code=2)

    assert "No such file" in refused(tmp_path / "none.jsonl")
    assert "holds no texts" in refused(lines(tmp_path / "empty.jsonl"))
    short = lines(tmp_path / "short.jsonl", {"text": "a"}, {"text": "b"})
    assert "all 2 texts have less than 8 tokens" in refused(short)
    output = refused(texts, "--samples", 1000)
    assert "--samples 1000" in output
    assert "has only 40 usable texts. Lower --samples" in output
    good = {"text": "a windlass lifts a load"}
    broken = lines(
        tmp_path / "broken.jsonl", good, "{oops", {"prompt": "x"}, {"messages": []}, {"text": 5}
    )
    output = refused(broken)
    assert "has 4 invalid lines" in output
    assert "line 2: is not JSON at column 2" in output
    assert "line 3: needs either text or messages" in output
    assert "--skip-bad-lines" in output
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"text": "a windlass lifts a load"}\n\xff\xfe\n')
    assert "line 2: is not UTF-8" in refused(binary)
    output = quantize(
        *(model, "-o", tmp_path / "o", *GPTQ, "--calibration", broken, "--skip-bad-lines")
    )
    assert "4 invalid lines skipped" in output
    assert "only 1 samples; 128 to 512 are advised" in output


def test_conversations_need_a_chat_template(
    texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    bare = write_model(tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text("{}")
    output = quantize(bare, "-o", tmp_path / "o", *GPTQ, "--calibration", texts, code=2)
    assert "has no chat template" in output


def test_invalid_weights_are_reported_by_name(
    texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    broken = write_model(tmp_path / "broken")
    tensors = tiny_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    output = quantize(broken, "-o", tmp_path / "o", "--method", "rtn", code=2)
    assert "model.layers.1.mlp.up_proj.weight holds NaN or infinite values" in output
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][:] = float("inf")
    save_file(tensors, broken / "model.safetensors")
    output = quantize(broken, "-o", tmp_path / "p", *GPTQ, "--calibration", texts, code=2)
    assert "the inputs of model.layers.0.self_attn.qkv_proj are not finite" in output
    tensors = tiny_tensors()
    tensors["model.layers.0.input_layernorm.weight"][0] = 1e6
    save_file(tensors, broken / "model.safetensors")
    output = quantize(broken, "-o", tmp_path / "q", "--method", "rtn", "--format", "awq", code=2)
    assert "which float16 cannot hold" in output


def test_quantised_source_is_refused(tmp_path: Path, quantize: Quantize) -> None:
    done = write_model(tmp_path / "done")
    config = CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (done / "config.json").write_text(json.dumps(config))
    output = quantize(done, "-o", tmp_path / "o", "--method", "rtn", code=2)
    assert "awq" in output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant", "fp8", "nf4"])
def test_gpu_gives_the_same_errors(
    method: str, model: Path, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    options = ("--method", method, "--calibration", texts, "--sample-tokens", 64, "--samples", 16)
    found = []
    for device in ("cpu", "cuda"):
        quantize(model, "-o", tmp_path / device, *options, device=device)
        quality = json.loads((tmp_path / device / "quality.json").read_text())
        found.append(quality["mean"]["output_error"])
    assert found[1] == pytest.approx(found[0], rel=0.1)
