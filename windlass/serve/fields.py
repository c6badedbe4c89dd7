"""Which fields of other servers' requests are known here but not done, and how fields are refused.

No option is ignored in silence: a field that is not done passes only with a value that changes
nothing, and an unknown one is refused with the nearest known name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from windlass.errors import RequestError

# Labels and hints for somebody else's bookkeeping: any value is fine.
_HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    }
)

# Known, not done. The values are those that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "flat_logprobs": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


def check_extra(extra: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse fields that would be ignored."""
    for name, value in extra.items():
        if name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            raise RequestError(unknown_field(name, [*known, *_HARMLESS]), name)
        if value is not None and value not in _NEUTRAL[name]:
            raise RequestError(
                f"{name} is not supported by this server; got {value!r:.100}. Leave it out.", name
            )


def unknown_field(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known fields: {', '.join(names)}."
    return f"unknown field {name!r}.{hint}"


def refusal(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, as one sentence with the field's name."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg']}.")
    if first["type"] == "missing":
        return RequestError(f"{param} is missing.", param)
    got = "" if isinstance(first["input"], (dict, list)) else f"; got {first['input']!r:.100}"
    return RequestError(f"{param or 'the body'}: {first['msg']}{got}.", param or None)
