"""Sampling flags, made from SamplingParams, and how they join the model's own defaults.

`seed` is the engine's flag: requests without a seed of their own draw theirs from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from windlass.cli.options import options_of
from windlass.core.sampling import SamplingParams

_HELP = {
    "temperature": "Randomness; 0 always takes the likeliest token.",
    "top_p": "Sample from the fewest tokens whose probabilities reach this.",
    "top_k": "Sample from so many of the likeliest tokens; 0: all.",
    "min_p": "Drop tokens below this share of the likeliest one's probability.",
    "presence_penalty": "Push down tokens that were generated before.",
    "frequency_penalty": "Push down tokens by how often they were generated.",
    "repetition_penalty": "Divide the scores of tokens seen in prompt or output; 1: off.",
    "logit_bias": "JSON of token ids to numbers that are added to their scores.",
    "allowed_token_ids": "Only these token ids; may be given several times.",
    "bad_words": "Text that must not be generated; may be given several times.",
    "structured_outputs": "The form of the output: JSON with one of json, json_object, regex, choice, grammar.",
    "deterministic": "The same tokens alone and in any batch; slower.",
    "max_tokens": "Most tokens to generate.",
    "min_tokens": "Do not stop before so many tokens.",
    "stop": "Text that ends the output; may be given several times.",
    "stop_token_ids": "Token ids that end the output; may be given several times.",
    "ignore_eos": "Go on after the model's end-of-text token.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}

# Fields without a flag: `seed` is the engine's, the others change the shape of an answer.
WITHOUT_FLAG = ("n", "seed", "logprobs", "prompt_logprobs", "detokenize", "bad_token_ids")

SAMPLING_OPTIONS = options_of(SamplingParams, "Sampling", _HELP, WITHOUT_FLAG)
SAMPLING_NAMES = frozenset(item.name for item in fields(SamplingParams))


def sampling_params(*layers: Mapping[str, Any]) -> SamplingParams:
    """Lay options over each other, the later ones on top."""
    joined: dict[str, Any] = {}
    for layer in layers:
        joined |= layer
    return SamplingParams(**joined)
