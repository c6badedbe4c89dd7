"""Applies the table of other engines' flags to a command line or to keys of a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from windlass.cli.foreign_flags import BY_NAME, FOREIGN_FLAGS, MODEL, ForeignFlag
from windlass.errors import ConfigError

_SWITCH_WORDS = ("on", "off", "auto", "true", "false", "0", "1")
_MODEL_NAMES = next(row.names for row in BY_NAME.values() if row.ours == MODEL)
# Objects of these flags are merged when they are given several times.
_MERGED = ("--override-generation-config", "--hf-overrides", "--default-chat-template-kwargs")


class Parameter(Protocol):
    """A parameter of click."""

    opts: list[str]
    secondary_opts: list[str]
    nargs: int


def flags_of(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """The parameters by their flags, without arguments."""
    return {
        name: parameter
        for parameter in parameters
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


def translate(args: Sequence[str], known: Mapping[str, Parameter]) -> tuple[list[str], list[str]]:
    """A command line with our flags only, and lines for the log. Unknown flags stay as they are."""
    reader = _Reader(list(args), known)
    while reader.args:
        reader.next()
    merged = [word for item in reader.merged.items() for word in (item[0], json.dumps(item[1]))]
    split = reader.out.index("--") if "--" in reader.out else len(reader.out)
    return [*reader.out[:split], *merged, *reader.out[split:]], reader.notes


@dataclass(slots=True)
class _Reader:
    """Moves arguments from `args` to `out`."""

    args: list[str]
    known: Mapping[str, Parameter]
    out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    merged: dict[str, dict[str, object]] = field(default_factory=dict)
    model: str | None = None
    # The value of each of our flags so far, and the flag that set it.
    given: dict[str, tuple[str, str]] = field(default_factory=dict)

    def next(self) -> None:
        word = self.args.pop(0)
        if word == "--":
            self.out += [word, *self.args]
            self.args = []
            return
        if not _is_flag(word):
            self.out.append(word)
            self.model = word
            return
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = self._spelled(name)
        row = BY_NAME.get(name)
        if equals and self._takes_nothing(name, row):
            raise ConfigError(f"{name} takes no value, got {value!r}.")
        if equals:
            self.args.insert(0, value)
        if name in self.known and not (row is not None and row.extends_ours):
            self._own(name, row=None)
        elif row is not None and (row.extends_ours or self._has(row)):
            self._own(name, row) if name in self.known else self._foreign(name, row)
        else:  # click names the nearest flag
            self.out.append(word)
            del self.args[: 1 if equals else 0]

    def _takes_nothing(self, name: str, row: ForeignFlag | None) -> bool:
        if name in self.known:
            return bool(getattr(self.known[name], "is_flag", False))
        return row is not None and row.takes == "nothing"

    def _spelled(self, name: str) -> str:
        dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        return name if name in self.known else dashed

    def _has(self, row: ForeignFlag) -> bool:
        """Whether the command has the row's equivalent; flags without one are known to all."""
        flags = [word for word in row.ours.split() if word.startswith("-")]
        return bool(row.sampling) or all(name in self.known for name in flags)

    def _own(self, name: str, row: ForeignFlag | None) -> None:
        parameter = self.known[name]
        if getattr(parameter, "is_flag", False) or not self.args:
            self.out.append(name)
            return
        is_list = bool(getattr(parameter, "multiple", False))
        for value in self._values(is_list):
            if row is None:
                self._check_once([parameter.opts[0], value], parameter.opts[0])
                self._add([name, value])
            else:
                self._apply(row, name, value)

    def _foreign(self, name: str, row: ForeignFlag) -> None:
        if row.takes == "nothing":
            self._apply(row, name, "")
        elif row.takes == "maybe":
            has_value = self.args and self.args[0] in _SWITCH_WORDS
            self._apply(row, name, self.args.pop(0) if has_value else "")
        elif not self.args:
            raise ConfigError(f"{name} needs a value.")
        else:
            for value in self._values(row.takes == "values"):
                self._apply(row, name, value)

    def _values(self, is_list: bool) -> list[str]:
        """The value of a flag; those of a list may be several words, or a JSON list."""
        values = [self.args.pop(0)]
        while is_list and self.args and self._is_value(self.args[0]):
            values.append(self.args.pop(0))
        if is_list and len(values) == 1 and values[0].startswith("["):
            try:
                items = json.loads(values[0])
            except ValueError:
                return values
            return [str(item) for item in items]
        return values

    def _is_value(self, word: str) -> bool:
        """Whether a word behind a list is one more item, and not the model."""
        has_model = self.model is not None or any(
            each.partition("=")[0] in _MODEL_NAMES for each in self.args
        )
        return not _is_flag(word) and (has_model or "=" in word or word.startswith("{"))

    def _apply(self, row: ForeignFlag, name: str, value: str) -> None:
        words, note = row.apply(name, value, self.known)
        if note:
            self.notes.append(note)
        if words and words[0] == MODEL:
            if self.model is not None:
                raise ConfigError(f"the model is given twice: {self.model} and {name} {value}.")
            self.model = value
            self.out.append(value)
            return
        self._check_once(words, name)
        self._add(words)

    def _check_once(self, words: list[str], name: str) -> None:
        """Refuse a flag of another engine beside another flag that sets the same to another value."""
        if len(words) != 2 or words[0] in _MERGED:
            return
        if getattr(self.known.get(words[0]), "multiple", False):
            return
        flag, value = words
        before, by = self.given.get(flag, (value, name))
        if before != value and not by == name == flag:
            raise ConfigError(f"{by} and {name} both set {flag}: to {before} and to {value}.")
        self.given[flag] = (value, name)

    def _add(self, words: list[str]) -> None:
        if len(words) == 2 and words[0] in _MERGED:
            try:
                found = json.loads(words[1])
            except ValueError:
                found = None
            if isinstance(found, dict):
                self.merged.setdefault(words[0], {}).update(found)
                return
        self.out += words


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def markdown() -> str:
    """The tables of docs/flags.md."""
    parts = []
    for title, rows in FOREIGN_FLAGS.items():
        lines = [f"### {title}", "", "| flag | of | here |", "|---|---|---|"]
        for row in rows:
            names = " ".join(f"`{name}`" for name in row.names)
            lines.append(f"| {names} | {row.engines} | {_meaning(row)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _meaning(row: ForeignFlag) -> str:
    if row.ours:
        text = row.ours if row.ours == MODEL else f"`{row.ours}`"
        if row.values:
            pairs = (f"{theirs} is {ours}" for theirs, ours in row.values.items())
            text += f" ({', '.join(pairs)})"
        if row.sampling:
            text += "; `serve`: a default in `--override-generation-config`"
        if row.unset and row.note:
            text += f"; {', '.join(row.unset)}: no effect: {row.note}"
        elif row.note:
            text += f"; {row.note}"
        return text
    if row.refusal:
        accepted = f"{', '.join(row.unset)}: no effect; else " if row.unset else ""
        return f"{accepted}refused: {row.refusal}"
    return f"no effect: {row.note}"


if __name__ == "__main__":
    print(markdown(), end="")
