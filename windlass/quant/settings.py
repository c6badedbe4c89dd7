"""Typed reading of a quantization_config, so that a wrong field is named with its file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError

_REQUIRED: Any = object()


class Settings:
    """A view on one object of a config. A JSON null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where  # "config.json: quantization_config"

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, value, "a whole number")
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
        """A value of a closed set; another one is refused by name."""
        value = self._get(name, default)
        if isinstance(value, bool) != isinstance(next(iter(allowed)), bool) or value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise UnsupportedError(
                f"{self.where}: {name} is {value!r}, which cannot be read here. Known: {known}."
            )
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """A list of strings under the first of the names that is there; empty without any."""
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
        """An object inside this one."""
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
        """Inputs that share a scale; -1 is all of a row, here None."""
        size = self.whole(name, default)
        if size != -1 and size < 1:
            raise self.wrong(name, size, "a number above 0, or -1 for whole rows")
        return None if size == -1 else size

    def refuse(self, *names: str) -> None:
        """Fields that change what the tensors mean in ways that are not known here."""
        for name in names:
            if self._values.get(name):
                raise UnsupportedError(
                    f"{self.where}: {name} is {self._values[name]!r}; checkpoints with this field "
                    "set cannot be read here."
                )

    def wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {value!r}, expected {expected}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(
                f"{self.where}: field {name!r} is missing, so the weights cannot be understood."
            )
        return default


def is_named(module: str, names: Collection[str]) -> bool:
    """Whether a module is meant by a list of names: itself, an ancestor, its last part, or re:...."""
    for name in names:
        if name.startswith("re:"):
            if re.match(name.removeprefix("re:"), module):
                return True
        elif f".{name}." in f".{module}.":
            return True
    return False
