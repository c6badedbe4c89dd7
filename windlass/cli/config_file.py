"""Reads `--config FILE.yaml`: keys are flag names with - or _. An unknown key is an error.

Names of other engines' flags are keys, too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.cli.flags import log
from windlass.cli.foreign_flags import BY_NAME, MODEL, ForeignFlag
from windlass.cli.options import Option
from windlass.errors import ConfigError


def read_config(
    path: Path, options: Iterable[Option], on_note: Callable[[str], None] = log
) -> dict[str, Any]:
    """Return checked values by option name. An unknown key raises, with the nearest name.

    on_note: receives a line for each key that has no effect here.
    """
    option_of = {key: option for option in options for key in option.keys}
    found: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        row = BY_NAME.get("--" + name.replace("_", "-"))
        try:
            if name in option_of and (row is None or not row.extends_ours):
                read = {option_of[name].name: option_of[name].from_file(value)}
            elif row is not None:
                read, notes = _foreign(row, str(key), value, option_of)
                for note in notes:
                    on_note(f"{path}: {note}")
            else:
                raise ConfigError(_unknown(str(key), option_of))
            for twice in read.keys() & found.keys():
                raise ConfigError(f"{twice} is given twice, the second time as {key!r}.")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        found |= read
    return found


def _foreign(
    row: ForeignFlag, key: str, value: Any, option_of: Mapping[str, Option]
) -> tuple[dict[str, Any], list[str]]:
    """Values by option name for the key of another engine, and lines for the log."""
    known = {option.flag for option in option_of.values()}
    found: dict[str, Any] = {}
    notes: list[str] = []
    for item in value if isinstance(value, list) else [value]:
        if item is None or (item is False and row.takes == "nothing"):
            continue
        text = "" if item is True else item if isinstance(item, str) else json.dumps(item)
        words, note = row.apply(key, text, known)
        notes += [note] if note else []
        while words:
            flag = words.pop(0)
            name = "model" if flag == MODEL else flag.removeprefix("--").replace("-", "_")
            option = option_of.get(name) or option_of.get(name.removeprefix("no_"))
            if option is None:
                raise ConfigError(_unknown(key, option_of))
            if option.is_switch:
                found[option.name] = name in option.keys
            elif option.is_list:
                found[option.name] = [*found.get(option.name, []), words.pop(0)]
            else:
                found[option.name] = option.from_text(words.pop(0))
    return found, notes


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
