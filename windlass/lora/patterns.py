"""Matches module names against the regular expressions of an adapter, which are untrusted input.

A hostile pattern can take years to match a name of forty letters and would block the whole process.
Patterns with at most one repetition and one group are matched here; all others in a subprocess
with one second of CPU time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache

MAX_PATTERN_CHARS = 4096
CPU_SECONDS = 1  # limit for patterns that are matched together
_WALL_S = 60.0  # wall-clock limit for the same work on a busy machine
_CHILD = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS} + 1))
patterns, names = json.load(sys.stdin)
found = [[name for name in names if re.fullmatch(pattern, name)] for pattern in patterns]
json.dump(found, sys.stdout)
"""
_SUFFIX = (r"(.*\.)?(", ")$")  # wraps a pattern that must match the end of a name, after a dot


class MatchError(Exception):
    """Patterns could not be matched, with the reason."""


def suffix_pattern(pattern: str) -> str:
    """The pattern that matches names ending in `pattern`, as PEFT defines it."""
    return pattern.join(_SUFFIX)


def pattern_error(pattern: str) -> str | None:
    """Why a pattern is invalid; None if it is valid."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"has {len(pattern):,} characters; the limit is {MAX_PATTERN_CHARS:,}"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression: {error}"
    return None


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[frozenset[str]]:
    """For each pattern, the names that it matches in full."""
    costly = tuple(pattern for pattern in patterns if not _is_cheap(pattern))
    found = dict(zip(costly, _match_in_child(costly, tuple(names)), strict=True)) if costly else {}
    return [found[each] if each in found else _match(each, names) for each in patterns]


def _is_cheap(pattern: str) -> bool:
    """Whether matching is at most quadratic in the length of a name."""
    if pattern.startswith(_SUFFIX[0]) and pattern.endswith(_SUFFIX[1]):
        pattern = pattern.removeprefix(_SUFFIX[0]).removesuffix(_SUFFIX[1])
    bare = pattern.replace("(?:", "(")
    repetitions = sum(map(bare.count, "*+?{"))
    return repetitions <= 1 and bare.count("(") <= 1 and not re.search(r"\)[*+?{]", bare)


def _match(pattern: str, names: Sequence[str]) -> frozenset[str]:
    return frozenset(filter(re.compile(pattern).fullmatch, names))


@lru_cache(maxsize=64)
def _match_in_child(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[frozenset[str]]:
    """Match in a subprocess that the system ends after CPU_SECONDS."""
    command = [sys.executable or "python3", "-I", "-S", "-W", "ignore", "-c", _CHILD]
    text = json.dumps([patterns, names])
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_WALL_S)
    except subprocess.TimeoutExpired as error:
        raise MatchError(f"takes more than {_WALL_S:.0f} s") from error
    except OSError as error:
        raise MatchError(f"needs a subprocess, which cannot be started: {error}") from error
    if done.returncode < 0:
        raise MatchError(f"takes more than {CPU_SECONDS} s of CPU time")
    if done.returncode:
        raise MatchError(f"failed: {done.stderr.strip()[-200:]}")
    return [frozenset(found) for found in json.loads(done.stdout)]
