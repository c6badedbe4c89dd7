"""Reads `--config FILE.yaml`: keys are flag names with - or _. An unknown key is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from windlass.cli.options import Option
from windlass.errors import ConfigError


def read_config(path: Path, options: Iterable[Option]) -> dict[str, Any]:
    """Return checked values by option name. An unknown key raises, with the nearest name."""
    option_of = {key: option for option in options for key in option.keys}
    found: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        option = option_of.get(str(key).replace("-", "_"))
        if option is None:
            raise ConfigError(f"{path}: {_unknown(str(key), option_of)}")
        if option.name in found:
            raise ConfigError(f"{path}: {option.name} is given twice, the second time as {key!r}.")
        try:
            found[option.name] = option.from_file(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    return found


def _mapping(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: holds a YAML {type(content).__name__}; expected keys and values, for "
            "example max-num-seqs: 64."
        )
    return content


def _unknown(key: str, known: Iterable[str]) -> str:
    names = sorted(name.replace("_", "-") for name in known)
    near = difflib.get_close_matches(key.replace("_", "-"), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
    return f"unknown option {key!r} for this command. {hint}"
