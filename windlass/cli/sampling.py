"""Sampling flags, generated from SamplingParams, and their merge with the model's defaults.

`seed` is an engine flag: requests without a seed derive theirs from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from windlass.cli.options import options_of
from windlass.core.sampling import SamplingParams

_HELP = {
    "temperature": "Sampling temperature; 0: greedy.",
    "top_p": "Sample from the smallest set of tokens with this total probability.",
    "top_k": "Sample from this many most likely tokens; 0: all.",
    "min_p": "Drop tokens below this share of the highest probability.",
    "presence_penalty": "Subtracted from the logits of tokens that were generated before.",
    "frequency_penalty": "Subtracted from a token's logit once per time it was generated.",
    "repetition_penalty": "Lowers the logits of tokens in prompt or output by this factor; 1: off.",
    "logit_bias": "JSON object: token ids to values that are added to their logits.",
    "allowed_token_ids": "Sample from these token ids only; repeatable.",
    "bad_words": "Text that must not be generated; repeatable.",
    "structured_outputs": "Structured output: JSON object with one of json, json_object, regex, choice, grammar.",
    "thinking_token_budget": "Maximum number of reasoning tokens of a chat; then the answer begins.",
    "deterministic": "Batch-invariant: the same tokens alone and in any batch; slower.",
    "max_tokens": "Maximum number of tokens to generate.",
    "min_tokens": "Minimum number of tokens to generate.",
    "stop": "Text that ends the output; repeatable.",
    "stop_token_ids": "Token id that ends the output; repeatable.",
    "ignore_eos": "Continue after the end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "skip_special_tokens": "Omit special tokens from the text.",
}

# Fields without a flag: `seed` is an engine flag, others change the shape of the result or are internal.
WITHOUT_FLAG = (
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "bad_token_ids",
    "reasoning",
)

SAMPLING_OPTIONS = options_of(SamplingParams, "Sampling", _HELP, WITHOUT_FLAG)
SAMPLING_NAMES = frozenset(item.name for item in fields(SamplingParams))


def sampling_params(*layers: Mapping[str, Any]) -> SamplingParams:
    """Merge options into SamplingParams; later layers take precedence."""
    joined: dict[str, Any] = {}
    for layer in layers:
        joined |= layer
    return SamplingParams(**joined)
