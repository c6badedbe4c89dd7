"""Written checkpoints: other programs can read them, with the intended weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.quantize.conftest import Quantize, write_model
from windlass.tools.quantize.layouts import pack
from windlass.tools.quantize.weights import quantise_activations_float8

CALIBRATED = ("--sample-tokens", "64", "--samples", "16")


def words_to_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Code i of a row is at bit i * bits of the row's words, read as one long number."""
    rows = []
    for row in words.tolist():
        number = sum((word & 0xFFFFFFFF) << (32 * at) for at, word in enumerate(row))
        rows.append([(number >> (bits * i)) & ((1 << bits) - 1) for i in range(count)])
    return torch.tensor(rows)


def from_gptq(tensors: dict[str, Tensor], name: str, bits: int) -> Tensor:
    scales, groups = tensors[f"{name}.scales"].float(), tensors[f"{name}.g_idx"].long()
    codes = words_to_codes(tensors[f"{name}.qweight"].T, bits, len(groups))  # [out, in]
    zeros = words_to_codes(tensors[f"{name}.qzeros"], bits, scales.shape[1]) + 1  # [group, out]
    return (codes - zeros.T[:, groups]) * scales.T[:, groups]


def from_awq(tensors: dict[str, Tensor], name: str) -> Tensor:
    scales = tensors[f"{name}.scales"].float()  # [group, out]
    # Index of each of eight adjacent outputs in its word.
    index = [0, 4, 1, 5, 2, 6, 3, 7]

    def outputs(words: Tensor) -> Tensor:
        codes = words_to_codes(words, 4, scales.shape[1])
        return codes.unflatten(1, (-1, 8))[..., index].flatten(1)

    codes, zeros = outputs(tensors[f"{name}.qweight"]), outputs(tensors[f"{name}.qzeros"])
    size = len(codes) // len(scales)
    spread = zeros.repeat_interleave(size, 0), scales.repeat_interleave(size, 0)
    return ((codes - spread[0]) * spread[1]).T


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"], load_file(folder / "model.safetensors")


def relative_error(model: Path, restored: dict[str, Tensor]) -> float:
    original = load_file(model / "model.safetensors")
    lost = sum(float((restored[n] - original[n].float()).square().sum()) for n in restored)
    return lost / sum(float(original[n].float().square().sum()) for n in restored)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_packing_is_dense(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 96))
    assert torch.equal(words_to_codes(pack(codes, bits), bits, 96), codes)


@pytest.mark.parametrize("order", ["none", "static", "group"])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_layout(
    bits: int, order: str, model: Path, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    out = tmp_path / "out"
    flags = ("--method", "gptq", "--format", "gptq", "--bits", bits, "--act-order", order)
    quantize(model, "-o", out, *flags, "--calibration", texts, "--group-size", 32, *CALIBRATED)
    config, tensors = read(out)
    assert config["desc_act"] == (order == "group")
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(names) == 21
    restored = {f"{name}.weight": from_gptq(tensors, name, bits) for name in names}
    assert relative_error(model, restored) < {3: 0.16, 4: 0.03, 8: 2e-4}[bits]


def test_awq_layout(model: Path, texts: Path, tmp_path: Path, quantize: Quantize) -> None:
    out = tmp_path / "out"
    flags = ("--method", "rtn", "--format", "awq", "--bits", 4, "--group-size", 32)
    quantize(model, "-o", out, *flags)
    config, tensors = read(out)
    assert config["version"] == "gemm"
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    restored = {f"{name}.weight": from_awq(tensors, name) for name in names}
    assert relative_error(model, restored) < 0.02
    # The AWQ method changes the weights and the norms before them.
    scaled = tmp_path / "scaled"
    quantize(
        model, "-o", scaled, "--method", "awq", *flags[2:], "--calibration", texts, *CALIBRATED
    )
    _, changed = read(scaled)
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(changed[norm], tensors[norm])
    quality = json.loads((scaled / "quality.json").read_text())
    assert quality["calibration"]["samples"] == 16
    assert quality["layers"][2]["linears"]["mlp.down_proj"]["output_error"] > 0


def test_bitsandbytes_layout(model: Path, tmp_path: Path, quantize: Quantize) -> None:
    out = tmp_path / "out"
    quantize(model, "-o", out, "--method", "nf4")
    _, tensors = read(out)
    original = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    packed, state = tensors[name], tensors[f"{name}.quant_state.bitsandbytes__nf4"]
    parsed = json.loads(bytes(state.tolist()))
    assert parsed == {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [64, 128],
    }
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten().long()
    values = tensors[f"{name}.quant_map"][codes].view(-1, 64)
    dense = (values * tensors[f"{name}.absmax"][:, None]).view(64, 128)
    lost = (dense - original[name].float()).square().mean() / original[name].float().square().mean()
    assert float(lost) < 0.02


CASES = {
    "rtn": ("--method", "rtn", "--bits", "4", "--group-size", "32"),
    "asymmetric": ("--method", "rtn", "--bits", "4", "--group-size", "32", "--asymmetric"),
    "eight": ("--method", "rtn", "--bits", "8", "--group-size", "-1"),
    "gptq": ("--method", "gptq", "--bits", "4", "--group-size", "32"),
    "awq": ("--method", "awq", "--bits", "4", "--group-size", "32", "--asymmetric"),
    "smoothquant": ("--method", "smoothquant"),
    "fp8": ("--method", "fp8"),
}


def _int8_of_compressed_tensors(x: Tensor) -> Tensor:
    """compressed-tensors scales by absmax / 127.5; serving engines and Windlass by absmax / 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


ACTIVATIONS = {"smoothquant": _int8_of_compressed_tensors, "fp8": quantise_activations_float8}
MAX_ERROR = {
    "rtn": 0.54,
    "asymmetric": 0.45,
    "gptq": 0.54,
    "awq": 0.38,
    "eight": 0.048,
    "smoothquant": 0.08,
    "fp8": 0.23,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_compressed_tensors(
    case: str, model: Path, texts: Path, tmp_path: Path, quantize: Quantize
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = CASES[case]
    calibrated = case in ("gptq", "awq", "smoothquant")
    more = ("--calibration", texts, *CALIBRATED) if calibrated else ()
    out = tmp_path / "out"
    quantize(model, "-o", out, *flags, *more)
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    ) == ("[user]Hi")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        theirs = loaded(ids).logits.float()
        float_logits = original(ids).logits.float()
        expected = _with_dense_weights(original, out)
        if case in ACTIVATIONS:
            _quantise_inputs(expected, ACTIVATIONS[case])
        dense = expected(ids).logits.float()

    def apart(other: Tensor) -> float:
        return float((theirs - other).square().mean().sqrt() / float_logits.std())

    # transformers reads the intended weights and quantises activations as the format says: 0.
    assert apart(dense) < 1e-5
    # 10 % above the measured error: random weights are the worst case for quantisation.
    assert apart(float_logits) < MAX_ERROR[case]


def _quantise_inputs(network: Any, quantise: Callable[[Tensor], Tensor]) -> None:
    """Quantise the inputs of every linear layer."""
    for module in network.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (quantise(given[0]),))


def _with_dense_weights(network: Any, folder: Path) -> Any:
    """Load the folder's weights, dequantised here, into the network."""
    config, tensors = read(folder)
    args = config["config_groups"]["group_0"]["weights"]
    state = {}
    for name in network.state_dict():
        base = name.removesuffix(".weight")
        if f"{base}.weight_scale" not in tensors:
            state[name] = tensors[name].float()
            continue
        scale = tensors[f"{base}.weight_scale"].float()
        if f"{base}.weight" in tensors:
            state[name] = tensors[f"{base}.weight"].float() * scale
            continue
        num_out, num_in = tensors[f"{base}.weight_shape"].tolist()
        bits = args["num_bits"]
        codes = words_to_codes(tensors[f"{base}.weight_packed"], bits, num_in)
        zeros = torch.full(scale.shape, 1 << (bits - 1))
        if not args["symmetric"]:
            zeros = words_to_codes(tensors[f"{base}.weight_zero_point"].T, bits, num_out).T
        size = num_in // scale.shape[1]
        spread = zeros.repeat_interleave(size, 1), scale.repeat_interleave(size, 1)
        state[name] = (codes - spread[0]) * spread[1]
    network.load_state_dict(state)
    return network


def test_fp8_block_scales(tmp_path: Path, quantize: Quantize) -> None:
    wide = write_model(tmp_path / "wide", hidden_size=128, intermediate_size=384, head_dim=32)
    out = tmp_path / "out"
    quantize(wide, "-o", out, "--method", "fp8", "--scales", "block")
    config, tensors = read(out)
    group = config["config_groups"]["group_0"]
    assert group["weights"]["block_structure"] == [128, 128]
    assert tensors["model.layers.0.self_attn.k_proj.weight_scale"].shape == (1, 1)
    assert tensors["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 3)


@pytest.mark.model
def test_gguf_source_writes_tokenizer_and_template(
    small_gguf: Path, tmp_path: Path, quantize: Quantize
) -> None:
    from transformers import AutoTokenizer

    from windlass.build import open_model
    from windlass.config import EngineConfig

    out = tmp_path / "out"
    output = quantize(small_gguf, "-o", out, "--method", "rtn")
    assert "group size 64: 128 does not divide the 192 inputs of self_attn.q_proj" in output
    assert "Q4_1 already" in output
    ours = open_model(EngineConfig.of(model=str(small_gguf))).card
    theirs = AutoTokenizer.from_pretrained(out)
    text = "A windlass lifts 12,345 kg; naïve, isn't it?"
    assert theirs(text).input_ids == ours.tokenizer.encode(text)
    messages = [{"role": "user", "content": "Hi"}]
    assert "<|im_start|>user\nHi<|im_end|>" in theirs.apply_chat_template(messages, tokenize=False)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2]


def test_shards_have_an_index(
    model: Path, tmp_path: Path, quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.tools.quantize.checkpoint_files.SHARD_BYTES", 60_000)
    quantize(model, "-o", tmp_path / "out", "--method", "rtn", "--group-size", 32)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    for shard in shards:
        held = load_file(tmp_path / "out" / shard)
        assert set(held) == {name for name, at in index["weight_map"].items() if at == shard}
