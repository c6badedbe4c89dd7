"""Building blocks of config dataclasses: fields with a help text, range checks, option sorting.

The settings themselves are in config.py, speculative_config.py and lora_config.py. No torch here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, get_args, get_origin, get_type_hints

from windlass.errors import ConfigError

AUTO = -1  # for integers: the engine chooses the value and reports the reason
MAX_TIMEOUT_S = 1e7  # about 115 days; timers cannot wait much longer
_HIDDEN = "(set)"  # in place of keys and tokens

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    # As in vLLM, the case of a single letter counts.
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["fp8", "fp8-block", "int8", "w8a8", "int4", "w4a8", "nf4"]


def option(default: Any, help: str, *flags: str, live: bool = False, secret: bool = False) -> Any:
    """A config field with its help text. `flags`: further names of its command line flag.

    `live`: it can change while the server runs. Its readers take it from the current config at each
    use (serve/live_config.py), never from the config of the start. `secret`: it is never shown,
    also not in the `repr` of its config.
    """
    metadata = {"help": help, "flags": flags, "live": live, "secret": secret}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not secret)


def num_bytes(text: str) -> int:
    """Bytes from 4GiB, 4G, 512MiB, 1.5GB or a plain number."""
    found = _SIZE.fullmatch(text.strip())
    unit = "" if found is None else found[2]
    factor = _UNITS.get(unit, _UNITS.get(unit.lower()))
    if found is None or factor is None:
        raise ConfigError(
            f"{text!r} is not a size. Write a number of bytes, or a number with a unit: "
            "4GiB, 4G, 512MiB (powers of 1024), 1GB, 1g, 500MB (powers of 1000)."
        )
    return int(float(found[1]) * factor)


def at_least(owner: object, low: float, *names: str) -> None:
    """Raise ConfigError if a field of `owner` is below `low`, or NaN; None passes."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{flag(name)} must be at least {low:g}, got {value!r}.")


def is_set(owner: object, name: str) -> bool:
    """Whether a field of `owner` differs from its default."""
    (default,) = (each.default for each in fields(type(owner)) if each.name == name)  # type: ignore[arg-type]
    return bool(getattr(owner, name) != default)


def refuse_unused(owner: object, needed: str, *names: str) -> None:
    """Raise ConfigError if a field of `owner` is set, whose effect needs another option."""
    for name in names:
        if is_set(owner, name):
            raise ConfigError(f"{flag(name)} does nothing without {needed}.")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def live_fields(section: type) -> list[Field[Any]]:
    """The fields of a config dataclass that can change while the server runs."""
    return [item for item in fields(section) if item.metadata["live"]]


def describe(item: Field[Any], value: Any, source: str) -> dict[str, Any]:
    """A setting as GET /admin/config and `windlass config` show it, without secrets."""
    default = {} if item.default is MISSING else item.default
    hidden = item.metadata["secret"] and value
    return {
        "value": _HIDDEN if hidden else value,
        "default": default,
        "source": source,
        "live": item.metadata["live"],
    }


def split_options(sections: Mapping[str, type], options: Mapping[str, Any]) -> dict[str, Any]:
    """Make one instance per section from a flat mapping of options."""
    section_of = {item.name: key for key, section in sections.items() for item in fields(section)}
    sorted_options: dict[str, dict[str, Any]] = {key: {} for key in sections}
    for name, value in options.items():
        if name not in section_of:
            raise ConfigError(unknown_option(name, list(section_of)))
        section = sections[section_of[name]]
        sorted_options[section_of[name]][name] = checked(section, name, value)
    return {key: section(**sorted_options[key]) for key, section in sections.items()}


def unknown_option(name: str, known: Sequence[str]) -> str:
    """The message for a name that is no option, with the nearest one."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(sorted(known))}."
    return f"unknown option {name!r}.{hint}"


# What a value of a field's type has to be, by the type; bool is an int for Python.
_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str, PathLike), "a text"),
}


def checked(section: type, name: str, value: Any) -> Any:
    """Reject a value of another type; convert sizes in bytes, and lists, or one item, to tuples."""
    hint = get_type_hints(section)[name]
    if name.endswith("_bytes") and isinstance(value, str):
        try:
            return num_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{flag(name)}: {error}") from error
    if get_origin(hint) is tuple and isinstance(value, str):
        return (value,)
    if value is None:
        return None
    choices = _strings_in(hint)
    if choices and value not in choices:
        raise ConfigError(f"{flag(name)} must be one of {', '.join(choices)}; got {value!r}.")
    for kind, (types, text) in _KINDS.items():
        is_right = isinstance(value, types) and (kind is bool or not isinstance(value, bool))
        if hint in (kind, kind | None) and not is_right:
            raise ConfigError(f"{flag(name)} must be {text}; got {value!r:.100}.")
    return tuple(value) if isinstance(value, list) else value


def _strings_in(hint: Any) -> list[str]:
    """The strings that a Literal allows, also inside `Literal[...] | None`."""
    found: list[str] = []
    for arg in get_args(hint):
        found += [arg] if isinstance(arg, str) else _strings_in(arg)
    return found
