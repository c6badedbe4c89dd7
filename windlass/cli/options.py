"""Generates command line flags from config dataclasses.

A field's type decides the syntax: --x/--no-x for a bool, a repeatable flag for a tuple, JSON for a
mapping, 4GiB for bytes, 0.3% for shares. A flag that is not given is None; the dataclass keeps its
default.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cached_property
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from windlass.config import (
    CacheConfig,
    GateConfig,
    GrammarConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServeConfig,
    SpecConfig,
    flag,
)
from windlass.errors import ConfigError
from windlass.settings import num_bytes

_COUNTS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Fields that accept a per cent sign.
_SHARES = ("min_agreement", "max_ppl_increase")


def parse_size(text: str | int) -> int:
    """Bytes from 4GiB, 4G, 512MiB, 1.5GB or a plain number."""
    try:
        return num_bytes(str(text))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def parse_whole(text: str) -> int:
    """A whole number; as in vLLM, 4k is 4,000 and 4K is 4,096."""
    unit = _COUNTS.get(text[-1:])
    try:
        return int(text) if unit is None else int(float(text[:-1]) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not a whole number. Write 4096, 4k (4,000) or 4K (4,096)."
        ) from None


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number.") from None


def parse_share(text: str | float) -> float:
    """0.003 or 0.3%."""
    number = str(text).strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a share. Write 0.003 or 0.3%.") from None


def parse_json_object(text: object) -> dict[str, Any]:
    """A JSON object as text, or as a mapping from a config file."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f'expected a JSON object, for example {{"key": 1}}; got {text!r}.')
    return value


@dataclass(frozen=True)
class Option:
    """A dataclass field as a flag."""

    name: str
    hint: Any  # without None
    help: str
    default: Any
    panel: str
    aliases: tuple[str, ...] = ()
    live: bool = False  # can change while a server runs

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def keys(self) -> list[str]:
        """Names in a config file, with underscores."""
        long = [alias for alias in self.aliases if alias.startswith("--")]
        return [self.name, *(alias.removeprefix("--").replace("-", "_") for alias in long)]

    @cached_property
    def is_size(self) -> bool:
        return self.hint is int and self.name.endswith("_bytes")

    @cached_property
    def is_share(self) -> bool:
        return self.hint is float and self.name in _SHARES

    @cached_property
    def is_object(self) -> bool:
        return get_origin(self.hint) in (dict, Mapping) or is_dataclass(self.hint)

    @cached_property
    def is_list(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def is_switch(self) -> bool:
        return self.hint is bool

    @cached_property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()

    def parameter(self, of_server: bool = False) -> inspect.Parameter:
        """The function parameter from which typer makes the flag. `of_server`: mark live options."""
        names = [self.flag, *self.aliases]
        if self.is_switch:
            names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
        annotation, extra = self._typer_type()
        info = typer.Option(
            None,
            *names,
            help=self.help + self._default_text() + (" [live]" if self.live and of_server else ""),
            show_default=False,
            rich_help_panel=self.panel,
            **extra,
        )
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation
        )

    def _typer_type(self) -> tuple[Any, dict[str, Any]]:
        if self.is_size:
            return Any, {"parser": parse_size, "metavar": "SIZE"}
        if self.is_share:
            return Any, {"parser": parse_share, "metavar": "SHARE"}
        if self.is_object:
            return Any, {"parser": parse_json_object, "metavar": "JSON"}
        if self.is_list:
            item = get_args(self.hint)[0]
            return list[item] | None, {"metavar": _metavar(item)}  # type: ignore[valid-type]
        if self.is_switch:
            return bool | None, {}
        if self.hint in (int, float):
            parser = parse_whole if self.hint is int else parse_number
            return Any, {"parser": parser, "metavar": _metavar(self.hint)}
        return self.hint | None, {"metavar": "|".join(self.choices) or _metavar(self.hint)}

    def _default_text(self) -> str:
        if self.default is None or self.default in ("", (), {}):
            return ""
        shown = self.default
        if self.is_switch:
            shown = "yes" if shown else "no"
        elif self.is_size and shown % 2**20 == 0:
            shown = f"{shown // 2**20}MiB"
        return f" [default: {shown}]"

    def from_file(self, value: Any) -> Any:
        """Check a value from a config file. Raises ConfigError with the option's name."""
        if value is None:
            return None
        try:
            return self._converted(value)
        except (TypeError, ValueError, typer.BadParameter) as error:
            why = error if isinstance(error, typer.BadParameter) else self._expected()
            raise ConfigError(f"{self.name}: {why} Got {value!r}.") from error

    def from_text(self, text: str) -> Any:
        """Parse one value as on the command line. Raises ConfigError with the option's name."""
        try:
            if self.hint is int and not self.is_size:
                return parse_whole(text)
            return self._converted(parse_number(text) if self.hint is float else text)
        except (TypeError, ValueError, typer.BadParameter) as error:
            why = error if isinstance(error, typer.BadParameter) else self._expected()
            raise ConfigError(f"{self.name}: {why} Got {text!r}.") from error

    def _converted(self, value: Any) -> Any:
        if self.is_size:
            return parse_size(value)
        if self.is_share:
            return parse_share(value)
        if self.is_object:
            return parse_json_object(value)
        if self.is_list:
            items = value if isinstance(value, list) else [value]
            return [_exactly(get_args(self.hint)[0], item) for item in items]
        if self.choices and value not in self.choices:
            raise TypeError
        return value if self.choices else _exactly(self.hint, value)

    def _expected(self) -> str:
        if self.choices:
            return f"expected one of {', '.join(self.choices)}."
        item = get_args(self.hint)[0] if self.is_list else self.hint
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        return f"expected {kinds[item]}{', or a list of these' if self.is_list else ''}."


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]


def _exactly(kind: type, value: Any) -> Any:
    """Return the value if it has this type, else raise; 1 is a float, "1" and true are not."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def options_of(
    cls: type, panel: str, help: Mapping[str, str] | None = None, leave_out: Collection[str] = ()
) -> list[Option]:
    """The fields of a dataclass as options. `help`: texts of fields without one."""
    hints = get_type_hints(cls)
    return [
        Option(
            name=item.name,
            hint=_without_none(hints[item.name]),
            help=(help or {}).get(item.name) or item.metadata["help"],
            default=_default(item),
            panel=panel,
            aliases=item.metadata.get("flags", ()),
            live=item.metadata.get("live", False),
        )
        for item in fields(cls)
        if item.name not in leave_out
    ]


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kept,) = (arg for arg in get_args(hint) if arg is not type(None))
    return kept


def _default(item: Field[Any]) -> Any:
    return item.default if item.default is not MISSING else None


# The model is a positional argument.
MODEL_ARGUMENT = next(item for item in options_of(ModelConfig, "Model") if item.name == "model")
ENGINE_OPTIONS = [
    *options_of(ModelConfig, "Model", leave_out=["model"]),
    *options_of(CacheConfig, "KV cache"),
    *options_of(SchedulerConfig, "Scheduler"),
    *options_of(SpecConfig, "Speculation"),
]
# For commands whose requests can name an adapter.
LORA_OPTIONS = options_of(LoraConfig, "Adapters")
# For commands whose requests can have a grammar.
GRAMMAR_OPTIONS = options_of(GrammarConfig, "Structured outputs")
# For commands that can run one model on several devices.
PARALLEL_OPTIONS = options_of(ParallelConfig, "Parallelism")
SERVE_OPTIONS = options_of(ServeConfig, "Server")
GATE_OPTIONS = options_of(GateConfig, "Quality gate")
# The limits alone, for commands that measure quality themselves.
LIMIT_OPTIONS = [item for item in GATE_OPTIONS if not item.name.startswith("gate_")]
