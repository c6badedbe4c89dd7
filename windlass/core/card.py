"""What is known of a model before its weights are read, and what a running engine says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.core.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as the server sees it: text in, text out; no tensor. Made by models/card.py."""

    name: str  # as it appears in the API
    path: str  # the folder or file that it was found in
    architecture: str  # "LlamaForCausalLM"
    max_positions: int  # the longest context that the model was made for
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]  # "bos_token" -> "<|im_start|>", as templates want them
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # from generation_config.json


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many KV blocks there are, and why so many."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    reason: str  # "5.9 GiB of 23.5 GiB free (share 0.25), 720.0 KiB per block"

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up table: what, which, and why."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a built engine tells: limits for the server, and the start-up table."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    capacity: Capacity
    choices: list[Choice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per phase of the start-up
    memory: dict[str, int] = field(default_factory=dict)  # bytes: weights, KV cache, process
    adapters: dict[str, str] = field(default_factory=dict)  # where each lies, by name


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory that is held for one purpose."""

    num_bytes: int
    resident: int | None = None  # of these, in memory now; None: all, or not known


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the computing side holds. On a GPU the parts lie there, and `total` is the GPU's use."""

    device: str
    parts: dict[str, MemoryPart]
    total: int  # of the process: resident, or allocated on the device
    files: int = 0  # of the total: libraries and other files mapped into memory
    device_free: int | None = None
    device_total: int | None = None

    @property
    def unaccounted(self) -> int:
        """Of the total, what is in no part: the interpreter, the allocator's reserve, and others."""
        known = sum(
            part.num_bytes if part.resident is None else part.resident
            for part in self.parts.values()
        )
        return self.total - self.files - known
