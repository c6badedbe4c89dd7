"""What settings are made of: fields with a help text, checks, and a flat mapping sorted into them.

Which settings there are is said in config.py, speculative_config.py and lora_config.py. No torch here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_type_hints

from windlass.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["fp8", "fp8-block", "int8", "w8a8", "int4", "w4a8", "nf4"]


def option(default: Any, help: str, *flags: str) -> Any:
    metadata = {"help": help, "flags": flags}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(owner: object, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < low:
            raise ConfigError(f"{flag(name)} must be at least {low:g}, got {value!r}.")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def split_options(sections: Mapping[str, type], options: Mapping[str, Any]) -> dict[str, Any]:
    """Make one instance per section from a flat mapping of options."""
    homes = {item.name: key for key, section in sections.items() for item in fields(section)}
    sorted_options: dict[str, dict[str, Any]] = {key: {} for key in sections}
    for name, value in options.items():
        if name not in homes:
            raise ConfigError(_unknown(name, list(homes)))
        section = sections[homes[name]]
        sorted_options[homes[name]][name] = _checked(section, name, value)
    return {key: section(**sorted_options[key]) for key, section in sections.items()}


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
    return f"unknown option {name!r}.{hint}"


def _checked(section: type, name: str, value: Any) -> Any:
    """Refuse a value outside a closed set of strings; turn lists into tuples."""
    choices = _strings_in(get_type_hints(section)[name])
    if choices and value is not None and value not in choices:
        raise ConfigError(f"{flag(name)} must be one of {', '.join(choices)}; got {value!r}.")
    return tuple(value) if isinstance(value, list) else value


def _strings_in(hint: Any) -> list[str]:
    """The strings that a Literal allows, also inside `Literal[...] | None`."""
    found: list[str] = []
    for arg in get_args(hint):
        found += [arg] if isinstance(arg, str) else _strings_in(arg)
    return found
