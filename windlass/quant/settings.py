"""Typed access to a quantization_config. Errors name the field and its file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError

_REQUIRED: Any = object()


class Settings:
    """A view of one JSON object of a config. A null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where  # "config.json: quantization_config"

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def positive_int(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "an integer")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def one_of(self, name: str, allowed: Collection[Any], default: Any = _REQUIRED) -> Any:
        """A value of a closed set. Raises UnsupportedError for any other value."""
        value = self._get(name, default)
        if isinstance(value, bool) != isinstance(next(iter(allowed)), bool) or value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise UnsupportedError(
                f"{self.where}: {name} is {value!r}, which is not supported. Supported: {known}."
            )
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """The list of strings of the first present field among `names`; empty if none is present."""
        for name in names:
            if name in self:
                values = self._values[name]
                if not isinstance(values, list | tuple) or not all(
                    isinstance(value, str) for value in values
                ):
                    raise self.wrong(name, values, "a list of names")
                return tuple(values)
        return ()

    def section(self, name: str) -> Settings | None:
        """A nested object; None if absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, value, "an object")
        return Settings(value, f"{self.where}.{name}")

    def names(self) -> list[str]:
        return list(self._values)

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def group_size(self, name: str = "group_size", default: Any = _REQUIRED) -> int | None:
        """The group size; None for -1, which means the whole row."""
        size = self.positive_int(name, default)
        if size != -1 and size < 1:
            raise self.wrong(name, size, "a positive integer, or -1 for whole rows")
        return None if size == -1 else size

    def refuse(self, *names: str) -> None:
        """Raise if one of these fields is set: each changes the meaning of the tensors."""
        for name in names:
            if self._values.get(name):
                raise UnsupportedError(
                    f"{self.where}: {name} is {self._values[name]!r}; checkpoints with this field "
                    "are not supported."
                )

    def wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {value!r}, expected {expected}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where}: required field {name!r} is missing.")
        return default


def matches_any(module: str, names: Collection[str]) -> bool:
    """Whether a name in the list matches a module: its path or a part of it, or a pattern re:...."""
    for name in names:
        if name.startswith("re:"):
            if re.match(name.removeprefix("re:"), module):
                return True
        elif f".{name}." in f".{module}.":
            return True
    return False
