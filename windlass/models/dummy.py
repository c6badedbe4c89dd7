"""Dummy weights and a byte tokenizer (`--load-format dummy`).

They allow measurements of speed and memory without a download. The output is meaningless.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from windlass.errors import CheckpointError
from windlass.models.checkpoint import StoredTensor, region_shape
from windlass.quant.shard import Region

if TYPE_CHECKING:
    import torch

_STD = 0.02
_DECAYS = (".mamba.A", ".linear_attn.A")
# A prime, so that no matrix width divides it and repeats the same row.
_NUM_NOISE = 1_048_583


class DummyCheckpoint:
    """Random weights for any requested name and shape, deterministic in seed and name.

    Values are a slice of one noise buffer, at an offset hashed from the name: copying is about fifty
    times faster than drawing billions of random numbers.
    """

    def __init__(self, seed: int = 0, dtype: str = "float32", on_gpu: bool = False) -> None:
        self._seed = seed
        self._dtype = dtype
        self._on_gpu = (
            on_gpu  # make the noise on the GPU if there is one, to avoid copying gigabytes
        )

    def names(self) -> Collection[str]:
        return ()

    def stored(self, name: str) -> StoredTensor:
        raise CheckpointError(f"dummy weights store no tensor {name}; `read` makes them.")

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        del raw
        rows, *others = region or (slice(None),)
        start = rows.indices(shape[0])[0]
        width = math.prod(shape[1:])
        part = region_shape(shape, (rows,))
        if name.endswith("norm.weight"):
            return self._noise.new_ones(region_shape(shape, region))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        offset = (int.from_bytes(digest, "little") + start * width) % _NUM_NOISE
        count = part[0] * width
        copies = -(-(offset + count) // _NUM_NOISE)
        values = self._noise.repeat(copies)[offset : offset + count].reshape(part)
        values = values[(slice(None), *others)]
        return -values.abs() if name.endswith(_DECAYS) else values  # states must not grow

    @cached_property
    def _noise(self) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        noise = torch.randn(_NUM_NOISE, generator=generator) * _STD
        on_gpu = self._on_gpu and torch.cuda.is_available()
        return noise.to("cuda" if on_gpu else "cpu", getattr(torch, self._dtype))


class ByteTokenizer:
    """Maps bytes to tokens, for dummy weights without a tokenizer.

    A random network also samples ids above 255; they decode to their number, as in <300>.
    """

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def special_ids(self) -> tuple[int, ...]:
        return (*self._eos_ids, *range(256, self._vocab_size))

    @property
    def max_token_chars(self) -> int:
        return len(f"<{self._vocab_size - 1}>")

    def encode(self, text: str, add_special: bool = True) -> list[int]:  # noqa: ARG002
        return [byte % self._vocab_size for byte in text.encode()]

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        return [self.encode(first + second) for first, second in pairs]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [token for token in ids if not (skip_special and token in self._eos_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else f"<{token}>".encode()

    def byte_pieces(self, skip_special: bool) -> Mapping[int, bytes]:
        return self._pieces[skip_special]

    @cached_property
    def _pieces(self) -> dict[bool, dict[int, bytes]]:
        """The bytes of each token, by whether special tokens are skipped."""
        all_pieces = {token: self.token_bytes(token) for token in range(self._vocab_size)}
        return {False: all_pieces, True: all_pieces | dict.fromkeys(self._eos_ids, b"")}
