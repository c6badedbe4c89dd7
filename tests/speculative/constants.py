"""Compares the governor with another value of a constant, in the worlds of test_simple_rule.py.

python -m tests.speculative.constants costs.FEW=4 governor._DECAY=1
"""

from __future__ import annotations

import sys
from importlib import import_module

from tests.speculative.test_simple_rule import WORLDS, mean
from windlass.core.speculation.governor import Governor

_MODULES = [
    import_module(f"windlass.core.speculation.{name}")
    for name in ("backoff", "budget", "costs", "governor", "learned")
]


def speeds() -> list[float]:
    """The speed in each world, relative to plain steps."""
    return [speed(Governor) for speed in WORLDS.values()]


def speeds_with(module: str, name: str, value: float) -> list[float]:
    """The speeds with another value, also where a module has imported the constant."""
    before = getattr(import_module(f"windlass.core.speculation.{module}"), name)
    own = [import_module(f"windlass.core.speculation.{module}")]
    users = own if name.startswith("_") else [each for each in _MODULES if hasattr(each, name)]
    for each in users:
        setattr(each, name, value)
    try:
        return speeds()
    finally:
        for each in users:
            setattr(each, name, before)


def main() -> None:
    base = speeds()
    for change in sys.argv[1:]:
        where, _, value = change.partition("=")
        module, _, name = where.partition(".")
        changed = speeds_with(module, name, float(value))
        ratio, world = min(
            (new / old, world) for new, old, world in zip(changed, base, WORLDS, strict=True)
        )
        print(f"{change}: {mean(changed) / mean(base) - 1:+.2%}, worst {ratio - 1:+.1%} ({world})")


if __name__ == "__main__":
    main()
