"""Reading of PEFT folders, and the errors for unsupported ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lora.folders import ALL, SPEC, lora_tensors, peft_config, write_adapter
from windlass.errors import CheckpointError, EngineError, UnsupportedError
from windlass.lora.base import Adapter
from windlass.lora.peft import PeftConfig, read_adapter

Q0 = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q0}.lora_"


def read(folder: Path, max_rank: int = 64) -> Adapter:
    return read_adapter(folder, "a", SPEC, max_rank)


def test_scaling_is_folded_into_up(tmp_path: Path) -> None:
    stored = lora_tensors()
    adapter = read(write_adapter(tmp_path / "a", tensors=stored))
    assert len(adapter.modules) == 14
    low = adapter.modules[Q0]
    torch.testing.assert_close(low.down, stored[f"{KEY}A.weight"])
    torch.testing.assert_close(low.up, stored[f"{KEY}B.weight"] * 2)
    assert (adapter.rank, adapter.name) == (4, "a")


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    stored = lora_tensors()
    adapter = read(write_adapter(tmp_path / "a", tensors=stored, use_rslora=True))
    torch.testing.assert_close(
        adapter.modules[Q0].up, stored[f"{KEY}B.weight"] * (8 / math.sqrt(4))
    )


def test_tensor_names_with_an_adapter_name(tmp_path: Path) -> None:
    tensors = lora_tensors(middle=".default")
    assert len(read(write_adapter(tmp_path / "a", tensors=tensors)).modules) == 14


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    tensors = lora_tensors(4, targets=["v_proj"]) | lora_tensors(2, targets=["q_proj"])
    folder = write_adapter(
        tmp_path / "a",
        targets=["q_proj", "v_proj"],
        tensors=tensors,
        rank_pattern={"q_proj": 2},
        alpha_pattern={r"model\.layers\.[01]\.self_attn\.q_proj": 6},
    )
    other, longer = Q0.replace("q_proj", "v_proj"), "model.layers.0.self_attn.not_q_proj"
    found = PeftConfig.read(folder / "adapter_config.json").resolve([Q0, other, longer])
    assert (found.ranks[Q0], found.scalings[Q0]) == (2, 3.0)
    assert found.scalings[other] == 2.0
    # A pattern matches whole components at the end of a name, not any suffix.
    assert found.ranks[longer] == 4
    assert read(folder).modules[Q0].down.shape == (2, 64)


@pytest.mark.parametrize(
    ("targets", "changes", "expected"),
    [
        (["q_proj"], {}, {"0", "1"}),
        (r".*\.1\.self_attn\.q_proj", {}, {"1"}),
        (["q_proj"], {"layers_to_transform": [0]}, {"0"}),
        (["q_proj"], {"layers_to_transform": 0}, {"0"}),
        (["q_proj"], {"layers_to_transform": []}, {"0", "1"}),
        (["q_proj"], {"exclude_modules": r".*\.0\..*"}, {"1"}),
        (["model.layers.1.self_attn.q_proj"], {"layers_to_transform": [0]}, {"1"}),
    ],
)
def test_targeted_modules(
    tmp_path: Path, targets: Any, changes: dict[str, Any], expected: set[str]
) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(peft_config(targets=targets, **changes)))
    modules = {f"model.layers.{n}.self_attn.q_proj": n for n in "01"} | {"lm_head": "head"}
    found = PeftConfig.read(file).resolve(modules).targeted
    assert {modules[module] for module in found} == expected


def test_lm_head_can_be_targeted(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path / "a", targets=["lm_head"]))
    assert adapter.modules["lm_head"].up.shape == (97, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save is \['embed_tokens'\]"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(": 2}}, "regular expression"),
        ({"rank_pattern": {"q_proj": 8}}, r"shape \[4, 64\].*\[8, 64\]"),
        (
            {"r": 2},
            r"it must be \[2, \d+\]. The ranks in adapter_config.json do not match the weights",
        ),
        ({"r": 300}, r"maximum of 64. --max-lora-rank is limited to 256"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*expected a positive number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "must be above 0, got 1000"),
        ({"target_modules": ["q_proj"]}, "not in the target_modules"),
        ({"target_modules": [*ALL, "lm_head"]}, "no tensors: lm_head"),
    ],
)
def test_unsupported_configs_are_rejected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_adapter(tmp_path / "a", **changes)
    with pytest.raises(EngineError, match=message):
        read(folder)


def test_rank_above_the_limit_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 16, above the engine's maximum of 8"):
        read(write_adapter(tmp_path / "a", rank=16), max_rank=8)
    wider = write_adapter(tmp_path / "b", rank=16, rank_pattern={"v_proj": 32})
    with pytest.raises(CheckpointError, match="Start the engine with --max-lora-rank 32"):
        read(wider, max_rank=8)


def test_adapter_of_another_base_is_rejected_by_shape(tmp_path: Path) -> None:
    tensors = lora_tensors()
    tensors[f"{KEY}A.weight"] = torch.zeros(4, 128)
    words = r"lora_A of model.layers.0.self_attn.q_proj has shape \[4, 128\].*\[64, 64\].*tiny/base"
    with pytest.raises(CheckpointError, match=words):
        read(write_adapter(tmp_path / "a", tensors=tensors))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("letter", "AB")
def test_non_finite_values_are_rejected(tmp_path: Path, letter: str, bad: float) -> None:
    tensors = lora_tensors()
    tensors[f"{KEY}{letter}.weight"][1, 1] = bad
    with pytest.raises(CheckpointError, match=f"{Q0} has values that are not finite"):
        read(write_adapter(tmp_path / "a", tensors=tensors))


def test_unknown_and_missing_tensors_are_rejected(tmp_path: Path) -> None:
    tensors = lora_tensors()
    extra = {"base_model.model.lm_head.weight": torch.zeros(97, 64)}
    with pytest.raises(UnsupportedError, match=r"lm_head.weight is not a known LoRA tensor"):
        read(write_adapter(tmp_path / "extra", tensors=tensors | extra))
    extra = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 97)}
    with pytest.raises(UnsupportedError, match=r"lora_embedding_A belongs to embeddings"):
        read(write_adapter(tmp_path / "embeddings", tensors=tensors | extra))
    unknown = {
        f"base_model.model.model.layers.7.q_proj.lora_{x}.weight": torch.zeros(4, 4) for x in "AB"
    }
    with pytest.raises(
        CheckpointError, match=r"model.layers.7.q_proj, which is not a linear layer"
    ):
        read(write_adapter(tmp_path / "unknown", tensors=tensors | unknown))
    del tensors[f"{KEY}B.weight"]
    with pytest.raises(CheckpointError, match=f"{Q0} has no lora_B"):
        read(write_adapter(tmp_path / "half", tensors=tensors))
    whole = {k: v for k, v in lora_tensors().items() if "layers.1" not in k}
    with pytest.raises(CheckpointError, match=r"7 modules that adapter_config.json targets"):
        read(write_adapter(tmp_path / "layer", tensors=whole))


def test_copy_of_the_base_head_is_ignored(tmp_path: Path) -> None:
    tensors = lora_tensors(targets=["lm_head"])
    key = "base_model.model.lm_head.base_layer.weight"
    same, larger = {key: torch.zeros(97, 64)}, {key: torch.zeros(98, 64)}
    adapter = read(write_adapter(tmp_path / "a", targets=["lm_head"], tensors=tensors | same))
    assert list(adapter.modules) == ["lm_head"]
    with pytest.raises(CheckpointError, match=r"shape \[98, 64\], this model's weight \[97, 64\]"):
        read(write_adapter(tmp_path / "b", targets=["lm_head"], tensors=tensors | larger))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read(tmp_path / "nothing")
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"has no adapter_model.safetensors; the folder contains adapter_con"
    ):
        read(folder)
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="pickle is never loaded"):
        read(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json"):
        read(folder)


def test_truncated_weights(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        read(file.parent)


def test_deeply_nested_config(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a") / "adapter_config.json"
    file.write_text("[" * 200_000)
    with pytest.raises(
        CheckpointError, match=r"adapter_config.json: is not valid JSON: maximum rec"
    ):
        read(file.parent)
