"""Prompts with good answers, by which two versions of a model are compared."""

from __future__ import annotations

from pathlib import Path

import msgspec

from windlass.cluster.compare import MIN_RANKED
from windlass.errors import ConfigError, file_errors


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, and an answer that a good version finds likely."""

    prompt: str
    answer: str


def read_probes(path: str) -> list[Probe]:
    """Read a file of JSON lines; raises ConfigError with the line and the reason."""
    with file_errors(f"rollout: quality: {path}"):
        lines = Path(path).read_bytes().splitlines()
    probes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            probe = msgspec.json.decode(line, type=Probe)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"rollout: quality: {path}, line {number}: {error}. Expected "
                '{"prompt": "...", "answer": "..."}.'
            ) from error
        if not probe.answer:
            raise ConfigError(f"rollout: quality: {path}, line {number}: the answer is empty.")
        probes.append(probe)
    if len(probes) < MIN_RANKED:
        raise ConfigError(
            f"rollout: quality: {path} has {len(probes)} prompts; a comparison needs {MIN_RANKED}."
        )
    return probes
