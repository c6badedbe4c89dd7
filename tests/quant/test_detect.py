"""Supported quantization_configs, and errors for all others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quant import packers
from tests.quant.folders import loaded, rewrite, write_plain
from tests.quant.test_files import AWQ, FP8, GPTQ, INT4, NF4
from windlass.errors import CheckpointError, ConfigError, EngineError, UnsupportedError
from windlass.kernels.linears import Linears
from windlass.quant.detect import detect

LINEARS = Linears(torch.device("cpu"), torch.float32)


def int4(**changes: Any) -> dict[str, Any]:
    """The compressed-tensors config with other weights."""
    config = copy.deepcopy(INT4)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def group(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(INT4)
    config["config_groups"]["group_0"] |= changes
    return config


INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"bits": 4}, UnsupportedError, "quantised with 'unnamed'"),
        (
            {"quant_method": "quip"},
            UnsupportedError,
            "'quip', which is not supported. Supported: awq",
        ),
        (AWQ | {"bits": 5}, UnsupportedError, "bits is 5"),
        (AWQ | {"version": "gemv"}, UnsupportedError, "version is 'gemv'"),
        (AWQ | {"group_size": 0}, CheckpointError, "group_size is 0"),
        (AWQ | {"group_size": None}, CheckpointError, "'group_size' is missing"),
        (AWQ | {"zero_point": False}, UnsupportedError, "zero_point is False"),
        (AWQ | {"modules_to_not_convert": "x"}, CheckpointError, "a list of names"),
        (GPTQ | {"bits": 5}, UnsupportedError, "bits is 5"),
        (GPTQ | {"bits": "4"}, UnsupportedError, "bits is '4'"),
        (GPTQ | {"checkpoint_format": "marlin"}, UnsupportedError, "'marlin'"),
        (GPTQ | {"dynamic": {"-:x": {}}}, UnsupportedError, "dynamic is"),
        (FP8 | {"weight_block_size": [64, 64]}, UnsupportedError, "weight_block_size is [64, 64]"),
        (FP8 | {"activation_scheme": "none"}, UnsupportedError, "activation_scheme is 'none'"),
        (
            FP8 | {"activation_scheme": "static", "weight_block_size": [128, 128]},
            UnsupportedError,
            "contradicts weight_block_size",
        ),
        (NF4 | {"load_in_8bit": True}, CheckpointError, "both true"),
        (NF4 | {"bnb_4bit_quant_type": "int4"}, UnsupportedError, "'int4'"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, UnsupportedError, "quant_storage"),
        (INT4 | {"config_groups": {}}, CheckpointError, "no config_groups"),
        (INT4 | {"format": "marlin-24"}, UnsupportedError, "'marlin-24'"),
        (INT4 | {"format": "float-quantized"}, CheckpointError, "contradicts weights.type"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8}}, UnsupportedError, "kv_cache_scheme is"),
        (INT4 | {"sparsity_config": {"format": "bitmask"}}, UnsupportedError, "'bitmask'"),
        (int4(num_bits=5), UnsupportedError, "num_bits is 5"),
        (int4(strategy="block"), UnsupportedError, "strategy is 'block'"),
        (int4(actorder="odd"), UnsupportedError, "actorder is 'odd'"),
        (int4(dynamic=True), CheckpointError, "weights cannot be quantised dynamically"),
        (group(weights=None), UnsupportedError, "has no weights"),
        (group(input_activations=INT8_ACTIVATIONS), UnsupportedError, "need int8 weights"),
        (group(output_activations=INT8_ACTIVATIONS), UnsupportedError, "output_activations"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(
    config: dict[str, Any], error: type[EngineError], message: str
) -> None:
    with pytest.raises(error, match=r"some/config\.json: quantization_config") as caught:
        detect(config, "some/config.json", LINEARS)
    assert message in str(caught.value)


def test_empty_config_has_no_format() -> None:
    assert detect({}, "x", LINEARS) is None


def test_targets_by_name_pattern_and_class() -> None:
    config = copy.deepcopy(INT4)
    groups = config["config_groups"]
    eight = copy.deepcopy(groups["group_0"])
    eight["weights"]["num_bits"] = 8
    groups["group_1"] = eight | {"targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"]}
    config["ignore"] = ["lm_head", r"re:model\.layers\.1\..*"]
    found = detect(config, "x", LINEARS)
    assert found is not None
    names = {
        "model.layers.0.mlp.gate_proj": "compressed-tensors int4",
        "model.layers.0.mlp.up_proj": "compressed-tensors int8",
        "model.layers.0.mlp.down_proj": "compressed-tensors int8",
        "model.layers.1.mlp.down_proj": None,
        "lm_head": None,
    }
    for module, name in names.items():
        method = found.method(module)
        assert (method.name if method else None) == name


@pytest.mark.parametrize(
    ("names", "module", "skipped"),
    [
        (["k_proj"], "model.layers.0.self_attn.k_proj", True),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.11.mlp.up_proj", False),
        (["proj"], "model.layers.0.self_attn.k_proj", False),
        ([], "lm_head", True),
    ],
)
def test_skipped_modules_match_whole_names(names: list[str], module: str, skipped: bool) -> None:
    found = detect(AWQ | {"modules_to_not_convert": names}, "x", LINEARS)
    assert found is not None
    assert (found.method(module) is None) == skipped


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def awq_folder(plain: Path, tmp_path: Path) -> Path:
    return rewrite(plain, tmp_path / "q", lambda _, w: packers.awq(w, 32), AWQ)[0]


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace or remove one tensor of a folder."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, file)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_invalid_scale_names_its_tensor(awq_folder: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.scales"
    scales = load_file(awq_folder / "model.safetensors")[name]
    scales[1, 5] = value
    change(awq_folder, name, scales)
    with pytest.raises(CheckpointError, match=rf"tensor {name}: 1 of \d+ .* {value}"):
        loaded(awq_folder)


def test_missing_scales_are_named(awq_folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.scales"
    change(awq_folder, name, None)
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors .*{name}"):
        loaded(awq_folder)


def test_codes_of_another_dtype_are_rejected(awq_folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.qweight"
    change(awq_folder, name, torch.zeros(128, 16, dtype=torch.float32))
    with pytest.raises(CheckpointError, match=rf"{name} is stored as float32, expected int32"):
        loaded(awq_folder)


def test_weights_that_contradict_the_config_are_rejected(awq_folder: Path, plain: Path) -> None:
    changed = {"quantization_config": AWQ | {"group_size": 64}}
    with pytest.raises(CheckpointError, match=r"qzeros has shape \[4, 16\], .* needs \[2, 16\]"):
        loaded(awq_folder, hf_overrides=changed)
    with pytest.raises(CheckpointError, match="group size of 48 does not divide the 128 inputs"):
        loaded(awq_folder, hf_overrides={"quantization_config": AWQ | {"group_size": 48}})
    with pytest.raises(
        CheckpointError, match=r"lacks .*q_proj\.qweight.* unknown tensors: .*weight"
    ):
        loaded(plain, hf_overrides={"quantization_config": AWQ})


def test_invalid_g_idx_is_rejected(plain: Path, tmp_path: Path) -> None:
    folder, _ = rewrite(plain, tmp_path / "q", lambda _, w: packers.gptq(w, 4, 32), GPTQ)
    name = "model.layers.0.mlp.down_proj.g_idx"
    change(folder, name, torch.zeros(256, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=rf"{name}: group 0 has 256 inputs, not 32"):
        loaded(folder)
    change(folder, name, torch.full((256,), 9, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=rf"{name}: contains groups 9 to 9"):
        loaded(folder)


def test_invalid_quant_state_is_rejected(plain: Path, tmp_path: Path) -> None:
    folder, _ = rewrite(plain, tmp_path / "q", lambda _, w: packers.nf4(w, False), NF4)
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    change(folder, name, torch.tensor(list(b"not json"), dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=rf"{name}: is not the expected JSON"):
        loaded(folder)
    state = b'{"quant_type": "nf4", "blocksize": 128, "shape": [128, 256]}'
    change(folder, name, torch.tensor(list(state), dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match=r"'nf4', 128, \(128, 256\)"):
        loaded(folder)


def test_quantised_checkpoint_is_not_quantised_again(awq_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* quantised already \(awq\)"):
        loaded(awq_folder, quantization="fp8")
    with pytest.raises(ConfigError, match=r"--quantize-head: .* already"):
        loaded(awq_folder, quantization="int4", quantize_head=True)
    assert loaded(awq_folder, quantization="int4").weight_bytes > 0


def test_quantised_head_cannot_be_tied(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "tied", tied=True)
    quantization = INT4 | {"ignore": []}
    with pytest.raises(CheckpointError, match="covers lm_head, but with tie_word_embeddings"):
        loaded(folder, hf_overrides={"quantization_config": quantization})
