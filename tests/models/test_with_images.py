"""Models that also read images: their text part gives the logits of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.comparison import TINY, our_logits
from tests.models.test_dense_families import MINISTRAL_YARN
from tests.quant.folders import loaded, logits
from windlass.errors import UnsupportedError
from windlass.models.families.registry import read_hparams

IDS = torch.randint(6, 97, (37,), generator=torch.Generator().manual_seed(4))
TEXT: dict[str, Any] = {**TINY, "head_dim": 16}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
QWEN = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
OLD_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
MROPE = {**OLD_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
SECTIONS = {"rope_parameters": OLD_MROPE}
# The class, the text model's config, and the vision part's.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral-small-3.2": ("Mistral3", {**TEXT, "model_type": "mistral"}, PIXTRAL),
    "ministral-3": (
        "Mistral3",
        {**TEXT, "model_type": "ministral3", "rope_parameters": MINISTRAL_YARN},
        PIXTRAL,
    ),
    "qwen2-vl": ("Qwen2VL", {**TINY, **SECTIONS}, QWEN),
    "qwen2.5-vl": ("Qwen2_5_VL", {**TINY, **SECTIONS, "tie_word_embeddings": True}, QWEN),
    "qwen3-vl": ("Qwen3VL", {**TEXT, "rope_parameters": MROPE}, QWEN),
}


def save(name: str, folder: Path) -> torch.nn.Module:
    family, text, vision = CASES[name]
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    config = kind.config_class(text_config=dict(text), vision_config=dict(vision))
    config.tie_word_embeddings = bool(text.get("tie_word_embeddings"))
    torch.manual_seed(1)
    model = kind(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key
            parameter.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    with torch.inference_mode():
        want = model(input_ids=IDS[None]).logits[0]
    for chunks in ([37], [5, 1, 1, 30]):
        got = our_logits(tmp_path, IDS.tolist(), chunks)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.std() > 0.1, "the logits are too small for the comparison to mean anything"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_prefixes_of_old_and_new_files(prefix: str, tmp_path: Path) -> None:
    model = save("mistral-small-3.2", tmp_path)
    with torch.inference_mode():
        want = model(input_ids=IDS[None]).logits[0]
    file, tensors = tmp_path / "model.safetensors", {}
    for key, tensor in load_file(file).items():
        inner = key.replace("model.language_model.", "").replace("language_model.model.", "")
        tensors[key if inner == key else prefix + inner] = tensor
    if prefix.startswith("language_model"):
        head = next(key for key in tensors if key.endswith("lm_head.weight"))
        tensors["language_model.lm_head.weight"] = tensors.pop(head)
    assert f"{prefix}embed_tokens.weight" in tensors
    save_file(tensors, file)
    torch.testing.assert_close(our_logits(tmp_path, IDS.tolist(), [37]), want, atol=1e-4, rtol=1e-4)


def test_old_configs_of_qwen2_vl_are_flat() -> None:
    changes = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "vision_config": QWEN}
    for kind in ("qwen2_vl", "qwen2_5_vl"):
        name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[kind]
        config = {**TINY, **changes, "model_type": kind}
        hparams = read_hparams(config | {"architectures": [f"{name}ForConditionalGeneration"]})
        assert hparams.rope.kind == "default"
        assert hparams.qkv_bias


def mistral3(**changes: Any) -> dict[str, Any]:
    text = {**TEXT, "model_type": "mistral"}
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, **changes}


def test_names_in_weight_formats_are_those_of_the_text_model() -> None:
    ignored = ["language_model.lm_head", "re:model\\.language_model\\.layers\\.0\\..*"]
    formats = {"quant_method": "compressed-tensors", "ignore": [*ignored, "re:vision_tower.*"]}
    found = read_hparams(mistral3(quantization_config=formats)).quantization
    assert found["ignore"] == ["lm_head", "re:model\\.layers\\.0\\..*", "re:vision_tower.*"]


def test_other_text_models_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="of the type 'mamba', which is not supported"):
        read_hparams(mistral3(text_config={**TEXT, "model_type": "mamba"}))


def test_static_fp8_scales_under_the_names_of_transformers(tmp_path: Path) -> None:
    """Ministral 3 is published so: a scale per weight and one for its inputs, both scalars."""
    save("ministral-3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    skipped = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    method = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    config["quantization_config"] = method | {"modules_to_not_convert": skipped}
    stored = load_file(tmp_path / "model.safetensors")
    names = {"theirs": ("weight_scale_inv", "activation_scale")}
    names["ours"] = ("weight_scale", "input_scale")
    got = {}
    for kind, (weight_scale, input_scale) in names.items():
        tensors = dict(stored)
        for name, weight in stored.items():
            if "language_model." in name and name.endswith("_proj.weight"):
                scale = weight.abs().max() / 448
                module = name.removesuffix("weight")
                tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
                tensors[module + weight_scale] = scale.bfloat16()
                tensors[module + input_scale] = torch.tensor(0.02).bfloat16()
        folder = tmp_path / kind
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        got[kind] = logits(loaded(folder, device="cpu"), IDS.tolist())
    assert torch.equal(got["theirs"], got["ours"])
