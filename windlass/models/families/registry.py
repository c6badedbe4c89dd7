"""The architectures that the decoder implements, and the choice of a family for a config."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.families.base import Family
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.nearest import nearest
from windlass.models.tensor_rules import ModuleNames

# "module:family" in this package, by the name in config.json.
_FAMILIES = {
    "BambaForCausalLM": "bamba:BAMBA",
    "Cohere2ForCausalLM": "cohere:COHERE2",
    "CohereForCausalLM": "cohere:COHERE",
    "DeepseekV2ForCausalLM": "deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK_V3",
    "Exaone4ForCausalLM": "exaone:EXAONE4",
    "ExaoneForCausalLM": "exaone:EXAONE3",
    "FalconH1ForCausalLM": "falcon_h1:FALCON_H1",
    "Gemma2ForCausalLM": "gemma:GEMMA2",
    "Gemma3ForCausalLM": "gemma:GEMMA3",
    "Gemma3ForConditionalGeneration": "gemma:GEMMA3_WITH_IMAGES",
    "Gemma4ForCausalLM": "gemma4:GEMMA4",
    "Gemma4ForConditionalGeneration": "gemma4:GEMMA4_WITH_IMAGES",
    "GemmaForCausalLM": "gemma:GEMMA1",
    "Glm4ForCausalLM": "glm:GLM4",
    "GlmForCausalLM": "glm:GLM",
    "GPT2LMHeadModel": "gpt2:GPT2",
    "GPTNeoXForCausalLM": "gpt_neox:GPT_NEOX",
    "Glm4MoeForCausalLM": "glm_moe:GLM_MOE",
    "Glm4MoeLiteForCausalLM": "deepseek:GLM_MOE_LITE",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "GraniteForCausalLM": "granite:GRANITE",
    "GraniteMoeForCausalLM": "granite_moe:GRANITE_MOE",
    "GraniteMoeHybridForCausalLM": "granite_hybrid:GRANITE4",
    "InternLM2ForCausalLM": "internlm:INTERNLM2",
    "InternLM3ForCausalLM": "internlm:INTERNLM3",
    "Lfm2ForCausalLM": "lfm2:LFM2",
    "Lfm2MoeForCausalLM": "lfm2:LFM2_MOE",
    "Llama4ForCausalLM": "llama4:LLAMA4",
    "Llama4ForConditionalGeneration": "llama4:LLAMA4_WITH_IMAGES",
    "LlamaForCausalLM": "llama:LLAMA",
    "Ministral3ForCausalLM": "ministral:MINISTRAL3",
    "MinistralForCausalLM": "ministral:MINISTRAL",
    "Mistral3ForConditionalGeneration": "with_images:MISTRAL3",
    "MistralForCausalLM": "llama:MISTRAL",
    "MixtralForCausalLM": "mixtral:MIXTRAL",
    "NemotronForCausalLM": "nemotron:NEMOTRON",
    "NemotronHForCausalLM": "nemotron_h:NEMOTRON_H",
    "Olmo2ForCausalLM": "olmo:OLMO2",
    "Olmo3ForCausalLM": "olmo:OLMO3",
    "Phi3ForCausalLM": "phi:PHI3",
    "PhiForCausalLM": "phi:PHI",
    "PhiMoEForCausalLM": "phimoe:PHIMOE",  # of the published files
    "PhimoeForCausalLM": "phimoe:PHIMOE",
    "Qwen2ForCausalLM": "qwen:QWEN2",
    "Qwen2VLForConditionalGeneration": "with_images:QWEN2_VL",
    "Qwen2_5_VLForConditionalGeneration": "with_images:QWEN2_5_VL",
    "Qwen2MoeForCausalLM": "qwen:QWEN2_MOE",
    "Qwen3ForCausalLM": "qwen:QWEN3",
    "Qwen3MoeForCausalLM": "qwen:QWEN3_MOE",
    "Qwen3NextForCausalLM": "qwen_hybrid:QWEN3_NEXT",
    "Qwen3VLForConditionalGeneration": "with_images:QWEN3_VL",
    "Qwen3_5ForCausalLM": "qwen_hybrid:QWEN3_5",
    "Qwen3_5ForConditionalGeneration": "with_images:QWEN3_5_WITH_IMAGES",
    "Qwen3_5MoeForCausalLM": "qwen_hybrid:QWEN3_5_MOE",
    "Qwen3_5MoeForConditionalGeneration": "with_images:QWEN3_5_MOE_WITH_IMAGES",
    "SmolLM3ForCausalLM": "smollm3:SMOLLM3",
    "StableLmForCausalLM": "stablelm:STABLELM",
    "Starcoder2ForCausalLM": "starcoder2:STARCODER2",
}
# By llama.cpp's name.
_GGUF = {
    "chatglm": "GlmForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
ARCHITECTURES = tuple(_FAMILIES)


def family_of(architecture: str) -> Family:
    """The family of an architecture in ARCHITECTURES."""
    module, name = _FAMILIES[architecture].split(":")
    family = getattr(import_module(f"windlass.models.families.{module}"), name)
    assert isinstance(family, Family)
    return family


def gguf_architecture(name: str, source: str) -> str:
    """The architecture of a GGUF file, by llama.cpp's name of it."""
    if name not in _GGUF:
        raise UnsupportedError(
            f"{source}: GGUF architecture {name!r} is not supported. "
            f"Supported: {', '.join(_GGUF)}.{nearest(name) or _closest(name, _GGUF)}"
        )
    return _GGUF[name]


_MAX_LAYERS = 4096


def read_hparams(config: Mapping[str, Any], source: str = "config.json") -> HParams:
    """Read a config.json's dictionary. `source` is the file's name in error messages."""
    architecture = architecture_of(config, source)
    layers = config.get("num_hidden_layers")
    if (
        isinstance(layers, int) and layers > _MAX_LAYERS
    ):  # each needs memory before a weight is read
        raise CheckpointError(
            f"{source}: num_hidden_layers is {layers}, more than {_MAX_LAYERS}: not a real model."
        )
    family = family_of(architecture)
    hparams = family.read(Fields(config, source), architecture)
    _check_experts(hparams)
    if not hparams.quantization:
        return hparams
    names = module_names(hparams)

    def rename(module: str) -> list[str]:
        return [part.module for part in names.parts(module)] or [module]

    return replace(hparams, quantization=_renamed(hparams.quantization, rename))


def module_names(hparams: HParams) -> ModuleNames:
    """The modules of the network by those of files of safetensors."""
    family = family_of(hparams.architecture)
    return ModuleNames(family.outer_rules(hparams), family.rules(hparams))


def _check_experts(hparams: HParams) -> None:
    """Refuse an activation that the experts do not compute."""
    if hparams.moe is None or (kind := hparams.moe.activation.kind) == "clamped":
        return
    if kind != hparams.activation:
        raise UnsupportedError(
            f"{hparams.source}: the activation {hparams.activation} is not supported for the experts of "
            f"{hparams.architecture}, only {kind}."
        )


def _renamed(settings: Any, rename: Callable[[str], list[str]]) -> Any:
    """The settings of a weight format, whose lists name the network's modules, not those of the file.

    Patterns stay as they are.
    """
    if isinstance(settings, Mapping):
        return {key: _renamed(value, rename) for key, value in settings.items()}
    if not isinstance(settings, (list, tuple)):
        return settings
    found: list[Any] = []
    for each in settings:
        is_name = isinstance(each, str) and not each.startswith("re:")
        found += rename(each) if is_name else [_renamed(each, rename)]
    return found


def has_family(config: Mapping[str, Any], source: str) -> bool:
    """Whether the architecture of a config.json has a family here."""
    return _name(config, source) in _FAMILIES


def architecture_of(config: Mapping[str, Any], source: str) -> str:
    """The architecture's name, from `architectures`, else from `model_type`."""
    name = _name(config, source)
    if name not in _FAMILIES:
        raise UnsupportedError(
            f"{source}: architecture {name!r} is not supported. "
            f"Supported: {', '.join(_FAMILIES)}.{_closest(name, _FAMILIES)}"
        )
    return name


def _name(config: Mapping[str, Any], source: str) -> str:
    listed = config.get("architectures")
    if isinstance(listed, (list, tuple)) and listed:
        return str(listed[0])
    if "model_type" in config:
        by_type = {family_of(known).model_type: known for known in _FAMILIES}
        return by_type.get(config["model_type"], str(config["model_type"]))
    raise CheckpointError(
        f"{source}: has neither architectures nor model_type, so the architecture is unknown. "
        f'Add one, such as --hf-overrides \'{{"architectures": ["LlamaForCausalLM"]}}\'.'
    )


def _closest(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f" The closest name is {near[0]}." if near else ""
