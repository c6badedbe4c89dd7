"""Finds the modules that the regular expressions of an adapter mean. Anybody may have written them.

Some take years to match a name of forty letters, and everything in the process waits meanwhile. So
only those with at most one repetition and one group are matched here; the others in a process of
their own, with a second of a processor's time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

LONGEST = 4096  # characters of a pattern
SECONDS = 1  # of a processor, for patterns that are matched together
_WALL_S = 60.0  # that a busy machine may take for these
_CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS} + 1))
patterns, names = json.load(sys.stdin)
found = [[name for name in names if re.fullmatch(pattern, name)] for pattern in patterns]
json.dump(found, sys.stdout)
"""
_ENDING = (r"(.*\.)?(", ")$")  # around a pattern that is to fit the end of a name, after a dot


class NotMatched(Exception):
    """Why patterns could not be matched."""


def ending(pattern: str) -> str:
    """The pattern of names that end as this one, as PEFT means it."""
    return pattern.join(_ENDING)


def fault_of(pattern: str) -> str | None:
    """What speaks against a pattern; None: it may be matched."""
    if len(pattern) > LONGEST:
        return f"is {len(pattern):,} characters long, and up to {LONGEST:,} are read"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    return None


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[frozenset[str]]:
    """The names that each of the patterns matches as a whole."""
    hard = tuple(pattern for pattern in patterns if not _is_easy(pattern))
    found = dict(zip(hard, _elsewhere(hard, tuple(names)), strict=True)) if hard else {}
    return [found[each] if each in found else _here(each, names) for each in patterns]


def _is_easy(pattern: str) -> bool:
    """Whether the steps that it takes cannot grow faster than the square of a name's length."""
    if pattern.startswith(_ENDING[0]) and pattern.endswith(_ENDING[1]):
        pattern = pattern.removeprefix(_ENDING[0]).removesuffix(_ENDING[1])
    bare = pattern.replace("(?:", "(")
    repetitions = sum(map(bare.count, "*+?{"))
    return repetitions <= 1 and bare.count("(") <= 1 and not re.search(r"\)[*+?{]", bare)


def _here(pattern: str, names: Sequence[str]) -> frozenset[str]:
    return frozenset(filter(re.compile(pattern).fullmatch, names))


@lru_cache(maxsize=64)
def _elsewhere(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[frozenset[str]]:
    """The same in another process, which ends when its time is over."""
    command = [sys.executable or "python3", "-I", "-S", "-W", "ignore", "-c", _CHILD]
    text = json.dumps([patterns, names])
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_WALL_S)
    except subprocess.TimeoutExpired as error:
        raise NotMatched(f"takes more than {_WALL_S:.0f} s") from error
    except OSError as error:
        raise NotMatched(f"needs a process of its own, which cannot be started: {error}") from error
    if done.returncode < 0:
        raise NotMatched(f"takes more than {SECONDS} s of a processor's time")
    if done.returncode:
        raise NotMatched(f"failed: {done.stderr.strip()[-200:]}")
    return [frozenset(found) for found in json.loads(done.stdout)]
