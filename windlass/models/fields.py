"""Typed access to one JSON object. Errors name the field and its file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from windlass.errors import CheckpointError

_D = TypeVar("_D")
_REQUIRED: Any = object()
_LARGEST_INT = 2**31 - 1  # kernels count in 32 bits
LARGEST = sys.float_info.max  # JSON also allows larger integers, and infinity


class Fields:
    """A view of a config's dictionary. A JSON null counts as absent, as for the libraries that write configs."""

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        advice: str = "Download the file again, or set the value with --hf-overrides.",
    ) -> None:
        self._values = values
        self._advice = advice
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def present(self, *names: str) -> dict[str, Any]:
        """The present fields among `names`, unchecked."""
        return {name: self._values[name] for name in names if name in self}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """These fields, and those of `defaults` that are absent."""
        return self.updated(**{name: value for name, value in defaults.items() if name not in self})

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """The present fields among the keys of `names`, unchecked, under the names of another format."""
        return {names[name]: value for name, value in self.present(*names).items()}

    def updated(self, **values: Any) -> Fields:
        """A copy with other values, such as those that a family stores under names of its own."""
        return Fields({**self._values, **values}, self.source, self._advice)

    def positive_int(self, name: str, default: int = _REQUIRED) -> int:
        """A positive integer."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_INT:
            raise self._wrong(name, value, f"a positive integer up to {_LARGEST_INT}")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        return value

    def positive_int_or_none(self, name: str, default: int) -> int | None:
        """Like `positive_int`, but an explicit null returns None instead of the default."""
        if name in self._values and self._values[name] is None:
            return None
        return self.positive_int(name, default)

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A positive number."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= LARGEST
        ):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: _D) -> str | _D:
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return value

    def sequence(self, name: str) -> Sequence[Any] | None:
        value = self._get(name, None)
        if value is not None and not isinstance(value, (list, tuple)):
            raise self._wrong(name, value, "a list")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of token ids; empty if absent."""
        value = self._get(name, ())
        ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._wrong(name, value, "a token id or a list of token ids")
        return tuple(item for item in ids if item >= 0)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.source}: field {name!r} is missing. {self._advice}")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name} is {value!r:.200}, expected {expected}.")
