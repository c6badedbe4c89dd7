"""Facts about a model before its weights are read, and the report of a built engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.core.kv_layout import KVLayout
from windlass.core.pooling import ModelPooling
from windlass.core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """Special tokens for filling in the middle of a text (FIM)."""

    prefix: int
    suffix: int
    middle: int
    repo: int | None = None  # before the name of a repository
    file: int | None = None  # before the name of a file
    stop: tuple[int, ...] = ()  # end the middle, beside EOS


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model as the server sees it: name, tokenizer, template; no tensor. Made by models/card.py."""

    name: str  # as it appears in the API
    path: str  # the model's folder or file
    architecture: str  # "LlamaForCausalLM"
    max_positions: int  # maximum context length
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: Mapping[str, str]  # "bos_token" -> "<|im_start|>", for templates
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # from generation_config.json
    fim: FimTokens | None = None  # None: the model was not trained to fill in the middle
    pooling: ModelPooling = field(default_factory=ModelPooling)
    aliases: tuple[str, ...] = ()  # further names in the API


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of KV blocks, and the reason for it."""

    num_blocks: int
    layout: KVLayout
    bytes_per_block: int  # of the layout and of a proposer's KV beside it
    reason: str  # "5.9 GiB of 23.5 GiB free (share 0.25), 720.0 KiB per block"

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def token_bytes(self) -> int:
        """Bytes per token that all groups of the layout keep."""
        return self.bytes_per_block * len(self.layout.groups) // self.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that all groups of the layout can keep."""
        return self.num_blocks // len(self.layout.groups) * self.block_size


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up table: what was chosen, and why."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The report of a built engine: limits for the server, and the start-up table."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    capacity: Capacity
    choices: list[Choice] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per phase of the start-up
    memory: dict[str, int] = field(default_factory=dict)  # bytes: weights, KV cache, process
    adapters: dict[str, str] = field(default_factory=dict)  # folder of each adapter by name
    # With --role: what identifies the weights of each adapter on all hosts.
    adapter_versions: dict[str, str] = field(default_factory=dict)
    prefix_caching: bool = True
    default_tpot_ms: float | None = None  # target while --slo-tpot-ms sets none
    # What must be alike where KV blocks are exchanged with other hosts; empty: they are not.
    kv_facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one owner."""

    num_bytes: int
    resident: int | None = None  # resident bytes; None: all, or unknown


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Memory of the runner by owner. On a GPU, `parts` and `total` are device memory."""

    device: str
    parts: dict[str, MemoryPart]
    total: int  # of the process: resident, or allocated on the device
    files: int = 0  # of the total: memory-mapped libraries and files
    device_free: int | None = None
    device_total: int | None = None

    @property
    def unaccounted(self) -> int:
        """Bytes of the total without an owner: interpreter, allocator reserve, and the like."""
        known = sum(
            part.num_bytes if part.resident is None else part.resident
            for part in self.parts.values()
        )
        return self.total - self.files - known
