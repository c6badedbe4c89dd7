"""The tensors of a GGUF file under their names in transformers, dequantised when read.

llama.cpp stores the q and k rows of llama files in another order (RoPE pairs interleaved). `read`
returns them in the order that the networks expect.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import UnsupportedError
from windlass.models import gguf_config
from windlass.models.checkpoint import StoredTensor, check_shape, missing, region_shape
from windlass.models.families.base import GGUFFamily
from windlass.models.families.registry import family_of, gguf_architecture
from windlass.models.gguf_header import GGUFHeader, GGUFTensor, read_header
from windlass.quant.shard import Region

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([\w.]+?)((?:\.(?:weight|bias))?)")
_OUTER_NAME = re.compile(r"(\w+)\.(weight|bias)")
_PLAIN = ("F32", "F16", "BF16")


class GGUFCheckpoint:
    """An open GGUF file. Owns the memory map."""

    def __init__(self, path: Path) -> None:
        self._header = read_header(path)
        name = gguf_config.architecture_of(self._header)
        self._family = family_of(gguf_architecture(name, str(path)))
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in self._header.tensors.items():
            if name not in gguf_config.ROPE_FACTORS:
                self._tensors[hf_name(name, path, self._family.gguf)] = tensor

    @property
    def header(self) -> GGUFHeader:
        return self._header

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def stored(self, name: str) -> StoredTensor:
        tensor = self._tensor(name)
        plain = tensor.type.name in _PLAIN
        kind = tensor.type.name.lower() if plain else tensor.type.name
        return StoredTensor(tensor.shape, kind, tensor.num_bytes)

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        """See `Checkpoint.read`. Quantised tensors are returned as float32, others in their dtype."""
        import torch

        tensor = self._tensor(name)
        rows, columns = (*region, slice(None), slice(None))[:2]
        if raw:
            stored = (_num_rows(tensor), tensor.num_bytes // _num_rows(tensor))
            check_shape(name, stored, shape, self._header.path)
            return torch.from_numpy(self._blocks(name, rows, columns))
        check_shape(name, tensor.shape, shape, self._header.path)
        if len(shape) == 1 < len(tensor.shape):  # biases of all experts
            return self.read(name, tensor.shape).flatten()[region]
        kind = tensor.type
        width = math.prod(tensor.shape) // _num_rows(tensor)
        start, stop, _ = columns.indices(width)
        first = start // kind.block_size  # blocks are read whole, and their values cut
        last = -(-stop // kind.block_size)
        blocks = self._blocks(name, rows, slice(first * kind.block_bytes, last * kind.block_bytes))
        if kind.name in _PLAIN:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            values = torch.from_numpy(blocks).view(dtype[kind.name])
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            values = torch.from_numpy(dequantize(blocks, GGMLQuantizationType(tensor.type_id)))
        values = values[:, start - first * kind.block_size : stop - first * kind.block_size]
        return values.reshape(region_shape(shape, region))

    def _blocks(self, name: str, rows: slice, columns: slice) -> NDArray[Any]:
        """Stored bytes [rows, bytes per row], in the network's row order.

        A vector has one row per value, so that `rows` applies to it too.
        """
        import numpy as np

        tensor = self._tensor(name)
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        raw = raw.reshape(_num_rows(tensor), -1)[:, columns]
        order = self._row_order(name, _num_rows(tensor))
        return raw[rows] if order is None else np.take(raw, order[rows], axis=0)

    def hf_config(self) -> dict[str, Any]:
        """The metadata in the form of a config.json."""
        tensors = self._header.tensors
        names = [name for name in gguf_config.ROPE_FACTORS if name in tensors]
        return gguf_config.hf_config(
            self._header, {name: self._floats(name, tensors[name]) for name in names}
        )

    def _floats(self, name: str, tensor: GGUFTensor) -> list[float]:
        import numpy as np

        if tensor.type.name != "F32":
            raise UnsupportedError(
                f"{self._header.path}: {name} is {tensor.type.name}, expected F32."
            )
        count = tensor.num_bytes // 4
        values: list[float] = np.frombuffer(self._map, np.float32, count, tensor.offset).tolist()
        return values

    @cached_property
    def _map(self) -> mmap.mmap:
        with self._header.path.open("rb") as stream:
            # Copy-on-write, since torch expects writable memory; the file never changes.
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise missing(name, self._tensors, self._header.path)
        return self._tensors[name]

    def _row_order(self, name: str, num_rows: int) -> NDArray[Any] | None:
        """The file row of each network row; None if the order is the same."""
        if not self._family.gguf.permuted or ".self_attn." not in name:
            return None
        projection = name.split(".")[-2]
        if projection not in ("q_proj", "k_proj"):
            return None
        import numpy as np

        heads = gguf_config.head_counts(self._header)[projection == "k_proj"]
        # network: head, half, feature     file: head, feature, half
        file_rows = np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2)
        return file_rows.swapaxes(1, 2).reshape(-1)


def _num_rows(tensor: GGUFTensor) -> int:
    """Rows of a matrix; those of all experts of a stack; a vector has one per value."""
    return math.prod(tensor.shape[:-1]) if len(tensor.shape) > 2 else tensor.shape[0]


def hf_name(name: str, path: Path, family: GGUFFamily) -> str:
    """A tensor's name in the network. Raises for a tensor that the network does not have."""
    block, outer = _BLOCK_NAME.fullmatch(name), _OUTER_NAME.fullmatch(name)
    inner_names, outer_names = {**_INNER, **family.names}, {**_OUTER, **family.outer_names}
    if block and block[2] in inner_names:
        return f"model.layers.{block[1]}.{inner_names[block[2]]}{block[3]}"
    if outer and outer[1] in outer_names:
        return f"{outer_names[outer[1]]}.{outer[2]}"
    raise UnsupportedError(f"{path}: tensor {name} does not belong to a supported network.")
