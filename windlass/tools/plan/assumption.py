"""The assumptions of an estimate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption, and where its value is from."""

    name: str
    value: str
    source: str
