"""Adapters of families whose files name or store linear layers otherwise than the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.lora.folders import write_adapter
from tests.models import (
    test_falcon_h1,
    test_gemma4,
    test_lfm2,
    test_llama4,
    test_nemotron_h,
    test_qwen_hybrid,
)
from tests.models.adapters import check_adapters
from tests.models.comparison import save_tiny
from tests.models.test_dense_families import CASES as DENSE
from tests.runner.test_windows import make
from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.modules import AdaptedModules, linear_shapes
from windlass.lora.peft import read_adapter
from windlass.models.families.registry import read_hparams

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYER = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
Save = Callable[[Path], torch.nn.Module]
CASES: dict[str, tuple[Save, list[str]]] = {
    # The deltas are multiplied like the weights.
    "falcon-h1": (partial(test_falcon_h1.save, "multipliers"), LAYER),
    "bamba": (partial(save_tiny, "Bamba", test_falcon_h1.BAMBA["some attention"]), LAYER),
    "lfm2": (
        lambda folder: test_lfm2.save("dense", folder),
        ["q_proj", "k_proj", "v_proj", "w1", "w2", "w3"],
    ),
    # Its layers have other numbers in the network.
    "nemotron-h": (
        lambda folder: test_nemotron_h.save("dense", folder),
        [*ATTENTION, "up_proj", "down_proj"],
    ),
    # q_proj has gates of the heads' outputs, too.
    "qwen3.5": (lambda folder: test_qwen_hybrid.save("3.5", folder), LAYER),
    "llama4": (partial(save_tiny, "Llama4", {**test_llama4.SCOUT, "moe_layers": []}), LAYER),
    # k_proj gives keys and values in some layers.
    "gemma4 31B": (partial(test_gemma4.save, "31B"), LAYER),
    "gemma4 26B-A4B": (partial(test_gemma4.save, "26B-A4B"), LAYER),
    # Some layers have no keys and values.
    "gemma4 E2B": (partial(test_gemma4.save, "E2B"), LAYER),
    # Fused projections.
    "phi3": (
        partial(save_tiny, *DENSE["phi3-window"]),
        ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"],
    ),
    "gpt-neox": (
        partial(save_tiny, *DENSE["gpt-neox"]),
        ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_adapters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    save, targets = CASES[name]
    check_adapters(save(tmp_path), tmp_path, targets)


def test_slots_have_the_dtype_of_the_computation(tmp_path: Path) -> None:
    """Norms of some families are in float32."""
    test_gemma4.save("dense", tmp_path)
    options = {"enable_lora": True, "max_lora_rank": 8, "num_blocks": 20, "plain_kernels": True}
    sizes = [
        make(tmp_path, dtype=dtype, **options).report.memory["adapters"]
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model", "model"])
def test_names_in_a_model_that_also_reads_images(prefix: str) -> None:
    config = {"architectures": ["Gemma4ForConditionalGeneration"]}
    modules = AdaptedModules(read_hparams({**config, "text_config": test_gemma4.config()}))
    q = modules.parts(f"{prefix}.layers.1.self_attn.q_proj")
    assert [part.module for part in q] == ["model.layers.1.self_attn.q_proj"]
    assert not modules.parts("model.vision_tower.encoder.layers.1.self_attn.q_proj")


def test_two_modules_of_one_weight_are_refused(tmp_path: Path) -> None:
    hparams = read_hparams(test_lfm2.config_of())
    tensors = {}
    for name in ("feed_forward.w1", "mlp.gate_proj"):
        num_out, num_in = linear_shapes(hparams)["model.layers.0.mlp.gate_proj"]
        key = f"base_model.model.model.layers.0.{name}.lora_"
        tensors |= {
            f"{key}A.weight": torch.ones(4, num_in),
            f"{key}B.weight": torch.ones(num_out, 4),
        }
    folder = write_adapter(
        tmp_path / "a", targets=["w1", "gate_proj"], tensors=tensors, layers_to_transform=[0]
    )
    with pytest.raises(CheckpointError, match=r"w1 and .*gate_proj are both .*mlp\.gate_proj"):
        read_adapter(folder, "a", hparams, 8)


def test_gguf_files_with_unnamed_multipliers_take_no_adapters(tmp_path: Path) -> None:
    test_falcon_h1.save("multipliers", tmp_path)
    file = test_falcon_h1.write_falcon(tmp_path)
    assert make(file, num_blocks=20)
    with pytest.raises(
        UnsupportedError, match="the weights contain multipliers that the file does"
    ):
        make(file, num_blocks=20, enable_lora=True)
