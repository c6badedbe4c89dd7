"""Request fields that are known from other servers but not supported, and the errors for fields.

No field is ignored silently: an unsupported field passes only with a value that has no effect, and an
unknown field is named in a response header and the log, or is an error (--unknown-fields).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.body_limits import MAX_COMPARED_NAME_CHARS, MAX_UNKNOWN_FIELDS

_MAX_PARAM_CHARS = 100

# pydantic's messages use Python's type names; bodies are JSON.
_JSON_MESSAGES = {
    "dict_type": "Input should be a valid object",
    "list_type": "Input should be a valid array",
    "model_type": "Input should be a valid object",
}

# Metadata and hints that do not change the output: any value is accepted.
_IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

# Unsupported fields, each with the values that have no effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "detokenize": (True,),
    "documents": ([],),
    "flat_logprobs": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
_REPLACED = {"functions": "tools", "function_call": "tool_choice"}


def check_extra(extra: Mapping[str, Any], known: Iterable[str]) -> list[RequestError]:
    """Raise RequestError for unsupported fields; returns the errors of unknown ones."""
    unknown = [name for name in extra if name not in _IGNORED and name not in _NEUTRAL]
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise RequestError(
            f"{len(unknown):,} fields are unknown; at most {MAX_UNKNOWN_FIELDS} are tolerated. The "
            f"first is {abbreviate(unknown[0])}."
        )
    for name, value in extra.items():
        if name in _IGNORED or name in unknown:
            continue
        if value is not None and value not in _NEUTRAL[name]:
            newer = _REPLACED.get(name)
            advice = f"Use {newer}." if newer else "Leave it out."
            raise RequestError(
                f"{name} is not supported by this server; got {abbreviate(value)}. {advice}",
                name,
            )
    return [unknown_field(name, [*known, *_IGNORED]) for name in unknown]


def unknown_field(name: str, known: Iterable[str], param: str | None = None) -> RequestError:
    """The error for an unknown field, with the nearest known name; `param`: the enclosing field."""
    names = sorted(known)
    near: list[str] = []
    if len(name) <= MAX_COMPARED_NAME_CHARS:  # the comparison time grows with the length
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known fields: {', '.join(names)}."
    return RequestError(
        f"unknown field {abbreviate(name)}. {hint}", param or name[:_MAX_PARAM_CHARS]
    )


def validation_error(error: ValidationError, *within: str) -> RequestError:
    """Convert the first of pydantic's errors to one sentence with the field's name.

    `within`: the fields around what was validated.
    """
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part)[:_MAX_PARAM_CHARS] for part in (*within, *first["loc"]))
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            return RequestError(f"{param} is missing.", param)
        case "too_long":
            count, limit = len(first["input"]), context["max_length"]
            return RequestError(
                f"{param} has {count:,} items; at most {limit:,} are accepted.", param
            )
        case "string_too_long":
            count, limit = len(first["input"]), context["max_length"]
            return RequestError(
                f"{param} has {count:,} characters; at most {limit:,} are accepted.", param
            )
        case "value_error" if isinstance(first["input"], dict):  # about several of its fields
            return RequestError(f"{param}: {context['error']}.", param)
        case "value_error":
            message = str(context["error"])  # pydantic's own begins with "Value error"
        case _:
            message = _JSON_MESSAGES.get(first["type"], first["msg"])
    return RequestError(f"{param}: {message}; got {abbreviate(first['input'])}.", param)
