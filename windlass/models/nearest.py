"""The nearest model that runs, for popular ones that do not."""

from __future__ import annotations

# By the start of model_type, or of llama.cpp's name of the architecture; longer starts first.
NEAREST = {
    "baichuan": "Qwen 2.5 (Qwen2ForCausalLM)",
    "bloom": "Qwen 3 (Qwen3ForCausalLM)",
    "chatglm": "the version whose name ends with -hf, such as zai-org/glm-4-9b-chat-hf (GlmForCausalLM)",
    "dbrx": "Mixtral (MixtralForCausalLM)",
    "deepseek_v": "DeepSeek V3.1 (DeepseekV3ForCausalLM)",
    "falcon": "Falcon 3 (LlamaForCausalLM)",
    "gemma": "Gemma 3 or 4 (Gemma3ForConditionalGeneration, Gemma4ForConditionalGeneration)",
    "gpt_j": "Pythia (GPTNeoXForCausalLM)",
    "gpt_neo": "Pythia (GPTNeoXForCausalLM)",
    "gptj": "Pythia (GPTNeoXForCausalLM)",
    "grok": "Mixtral (MixtralForCausalLM)",
    "internvl": "the text model, such as Qwen 2.5 or Qwen 3",
    "jamba": "Granite 4 H (GraniteMoeHybridForCausalLM)",
    "kimi": "Kimi K2 (DeepseekV3ForCausalLM)",
    "lfm2": "SmolLM3 (SmolLM3ForCausalLM)",
    "llava": "the text model, such as Mistral or Llama",
    "mamba": "Granite 4 H (GraniteMoeHybridForCausalLM)",
    "minicpm": "Qwen 3 (Qwen3ForCausalLM)",
    "mllama": "Llama 3.1 of the same size (LlamaForCausalLM)",
    "mpt": "Qwen 3 (Qwen3ForCausalLM)",
    "nemotron-nas": "Llama 3.3 (LlamaForCausalLM)",
    "nemotron_h": "Granite 4 H (GraniteMoeHybridForCausalLM) or Minitron (NemotronForCausalLM)",
    "phi": "Phi 4 or Phi 4 mini (Phi3ForCausalLM)",
    "qwen": "Qwen 3 (Qwen3ForCausalLM, Qwen3MoeForCausalLM)",
}


def nearest(kind: str) -> str:
    """A sentence for an error, or nothing if there is no near model. `kind`: a model_type."""
    starts = sorted(NEAREST, key=len, reverse=True)
    found = next((start for start in starts if kind.lower().startswith(start)), None)
    return "" if found is None else f" The nearest that runs is {NEAREST[found]}."
