"""What the KV of a block depends on besides its tokens and their salt.

Stores that outlive an engine, or that several engines share, keep the records of each fingerprint
apart: a record of other weights is never found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b

from windlass.version import __version__

DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identifies interchangeable records. `model` is a name for people; every other field counts."""

    model: str
    weights: str  # digest of the model's files
    format: str  # how the weights are stored and computed, with the device and the kernels
    kv_dtype: str
    layout: str  # groups, layers and shapes of the KV cache
    block_size: int
    rank: int = 0
    world: int = 1
    version: str = __version__

    @cached_property
    def digest(self) -> bytes:
        """A hash of all fields but the model's name."""
        return digest_of({name: value for name, value in asdict(self).items() if name != "model"})

    def facts(self) -> dict[str, str]:
        """What must be alike on two machines that exchange records, by names for messages."""
        return {
            "the Windlass version": self.version,
            "the digest of the model's files": self.weights,
            "the format": self.format,
            "the type of the KV cache": self.kv_dtype,
            "the KV block size": str(self.block_size),
            "the KV layout": self.layout,
        }


def digest_of(facts: Mapping[str, object]) -> bytes:
    text = json.dumps(facts, sort_keys=True)
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
