"""Folders written by the compressed-tensors package give the same logits as transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quant.folders import IDS, loaded, logits, write_plain

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
FIXED = {"num_bits": 8, "strategy": "tensor", "dynamic": False}

# Format, weights, activations, and tolerance of the logits with quantised activations:
# the scale of int8 activations is absmax / 127.5 in transformers and absmax / 127 here.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, float]] = {
    "int4 groups": ("pack-quantized", INT4, None, 0),
    "int4 asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, None, 0),
    "int4 channel": ("pack-quantized", INT8 | {"num_bits": 4}, None, 0),
    "int8 groups": ("pack-quantized", INT4 | {"num_bits": 8}, None, 0),
    "int8 asymmetric": ("pack-quantized", INT4 | {"num_bits": 8, "symmetric": False}, None, 0),
    "w8a8": ("int-quantized", INT8, TOKEN | {"type": "int"}, 0.05),
    "w8a8 asymmetric": (
        "int-quantized",
        INT8 | {"symmetric": False},
        TOKEN | {"type": "int"},
        0.05,
    ),
    "w8a8 fixed": ("int-quantized", INT8, FIXED | {"type": "int"}, 0.02),
    "fp8": ("float-quantized", FP8, None, 0),
    "fp8 token": ("float-quantized", FP8, TOKEN | {"type": "float"}, 0.02),
    "fp8 tensor": ("float-quantized", FP8 | {"strategy": "tensor"}, None, 0),
    "fp8 fixed": (
        "float-quantized",
        FP8 | {"strategy": "tensor"},
        FIXED | {"type": "float"},
        0.02,
    ),
    "fp8 naive": ("naive-quantized", FP8, None, 0),
    "fp8 blocks": ("float-quantized", BLOCK, None, 0),
}
# Weight-only int8, unpacked; transformers expects packed weights.
BY_BYTE = {
    "int8 plain": ("int-quantized", INT8),
    "int8 plain groups": ("naive-quantized", INT4 | {"num_bits": 8}),
    "int4 naive": ("naive-quantized", INT4),
    "int4 naive asymmetric": ("naive-quantized", INT4 | {"symmetric": False}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model")


def scales_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Scales and zero points as the package computes them from the range of the weights."""
    num_out, num_in = weight.shape
    match args.strategy:
        case "group":
            parts = weight.view(num_out, -1, args.group_size)
            low, high = parts.amin(-1), parts.amax(-1)
        case "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            rows, columns = 128, 128
            padded = torch.nn.functional.pad(weight, (0, -num_in % columns, 0, -num_out % rows))
            parts = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        case _:
            low, high = weight.min().view(1), weight.max().view(1)
    return calculate_qparams(low, high, args)


def compress(
    source: Path,
    target: Path,
    kind: str,
    weight_args: dict[str, Any],
    input_args: dict[str, Any] | None = None,
) -> Path:
    """A folder in the format, written with the package's own compressor."""
    inputs = QuantizationArgs(**input_args) if input_args else None
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weight_args),
        input_activations=inputs,
    )
    compressor = BaseCompressor.get_value_from_registry(kind)
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[key] = tensor
            continue
        scale, zero = scales_of(tensor, scheme.weights)
        state = {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        if input_args and not input_args["dynamic"]:
            packed["input_scale"] = torch.tensor([0.03])
        tensors |= {f"{module}.{local}": value for local, value in packed.items()}
    target.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def theirs(folder: Path) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            found: Tensor = model.eval()(torch.tensor([IDS])).logits[0].float()
    return found


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, plain: Path, tmp_path: Path) -> None:
    kind, weights, inputs, far = CASES[name]
    folder = compress(plain, tmp_path / "q", kind, weights, inputs)
    want = theirs(folder)
    for options in ({"dtype": "float32"}, {"plain_kernels": True}):
        got = logits(loaded(folder, **options))
        if far:
            assert (got - want).norm() / want.norm() < far
        else:
            torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)
    assert (want - logits(loaded(plain))).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize("name", BY_BYTE)
def test_unpacked_int8_weights_dequantise_correctly(name: str, plain: Path, tmp_path: Path) -> None:
    kind, weights = BY_BYTE[name]
    folder = compress(plain, tmp_path / "bytes", kind, weights)
    want = theirs(compress(plain, tmp_path / "packed", "pack-quantized", weights))
    for options in ({"dtype": "float32"}, {"plain_kernels": True}):
        got = logits(loaded(folder, **options))
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)
