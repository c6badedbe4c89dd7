"""Reads an adapter's folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

peft_config.py reads the config. This file checks every tensor of the weights against it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.errors import CheckpointError, UnsupportedError
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora.open_below import Opener
from windlass.lora.peft_config import PeftConfig
from windlass.lora.stored import (
    TYPES,
    Array,
    StoredAdapter,
    StoredWeights,
    not_finite,
    read_arrays,
    version_of,
)
from windlass.lora_config import MAX_RANK
from windlass.models.checkpoint import read_header
from windlass.models.hparams import HParams

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# PEFT writes a copy of the base model's weight next to the LoRA weights of a head.
_BASE_COPY = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
# torch's names of the types of safetensors that weights may have.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}


def linear_shapes(hparams: HParams) -> dict[str, tuple[int, int]]:
    """(out, in) of every module that an adapter can change."""
    hidden = hparams.hidden_size
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(hparams.num_layers):
        attention, intermediate = (
            _attention_shapes(hparams, layer),
            hparams.intermediate_size_of(layer),
        )
        mlp = {"mlp.up_proj": (intermediate, hidden), "mlp.down_proj": (hidden, intermediate)}
        if hparams.gated_mlp:
            mlp = {"mlp.gate_proj": (intermediate, hidden), **mlp}
        is_moe = hparams.moe is not None and hparams.moe.layers[layer]
        # A recurrent mixer's projections have no adapters: the input projection is stored fused.
        mixer = attention if hparams.has_attention(layer) else {}
        modules = mixer if is_moe or not hparams.has_mlp(layer) else mixer | mlp
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in modules.items()}
    return shapes | {"lm_head": (hparams.vocab_size, hidden)}


def _attention_shapes(hparams: HParams, layer: int) -> dict[str, tuple[int, int]]:
    hidden = hparams.hidden_size
    if hparams.mla is None:
        kv_heads = hparams.kv_heads_of(layer)
        q, kv = hparams.num_heads * kv_heads.dim, kv_heads.num * kv_heads.dim
        shapes = {"q_proj": (2 * q if hparams.attention_gates else q, hidden)}
        # An adapter of a k_proj that gives keys and values would change both; the network has them apart.
        gives_both = hparams.keys_are_values and hparams.sliding_windows[layer] is None
        if hparams.kv_layer_of(layer) == layer and not gives_both:
            shapes |= {"k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        shapes["o_proj"] = (hidden, q)
    else:  # kv_b_proj is absorbed, so adapters cannot change it
        heads, rank = hparams.mla.heads, hparams.mla.q_rank
        q = heads.num_q * heads.query_dim
        shapes = {"q_proj": (q, hidden)}
        if rank is not None:
            shapes = {"q_a_proj": (rank, hidden), "q_b_proj": (q, rank)}
        shapes["kv_a_proj_with_mqa"] = (heads.dim, hidden)
        shapes["o_proj"] = (hidden, heads.num_q * heads.value_dim)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


class AdapterFolder:
    """An adapter on disk. The constructor checks config and header against the model.

    `stored` and `read` read the weights. `opener` opens every file; by default, `os.open`.
    """

    def __init__(
        self, folder: Path, hparams: HParams, max_rank: int, opener: Opener | None = None
    ) -> None:
        self._weights = folder / WEIGHTS
        self._opener = opener
        self.version = version_of(folder / CONFIG, self._weights, opener=opener)
        self.config = PeftConfig.read(_existing(folder, CONFIG, opener), opener)
        self._stored = read_header(_existing(folder, WEIGHTS, opener), opener)
        self._shapes = linear_shapes(hparams)
        self._modules = self.config.resolve(self._shapes)
        self._tensors = self._group_tensors()
        for module, pair in self._tensors.items():
            self._check_module(module)
            self._check_shapes(module, pair, max_rank)
        self._check_complete()

    def _group_tensors(self) -> dict[str, dict[str, str]]:
        """Tensor names by module and by letter, A or B. Raises for a tensor of an unknown kind."""
        found: dict[str, dict[str, str]] = {}
        for name in self._stored:
            if self._is_base_copy(name):
                continue
            parts = _KEY.fullmatch(name)
            if parts is None and "embed_tokens" in name:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} belongs to embeddings, which adapters cannot "
                    "change in this version. Train the adapter without embed_tokens, and without "
                    "ensure_weight_tying if lm_head is one of its target_modules."
                )
            if parts is None:
                raise UnsupportedError(
                    f"{self._weights}: tensor {name} is not a known LoRA tensor; expected "
                    "base_model.model.MODULE.lora_A.weight and lora_B.weight."
                )
            if found.setdefault(parts[1], {}).setdefault(parts[2], name) != name:
                raise CheckpointError(
                    f"{self._weights}: module {parts[1]} has two lora_{parts[2]} tensors."
                )
        for module, pair in found.items():
            if len(pair) != 2:
                letter = "B" if "A" in pair else "A"
                raise CheckpointError(f"{self._weights}: module {module} has no lora_{letter}.")
        if not found:
            raise CheckpointError(f"{self._weights}: contains no tensors.")
        return found

    def _is_base_copy(self, name: str) -> bool:
        """Whether a tensor is a copy of this base model's weight. Raises if its shape differs."""
        parts = _BASE_COPY.fullmatch(name)
        if parts is None:
            return False
        stored, shape = self._stored[name].shape, self._shapes.get(parts[1])
        if shape is not None and tuple(stored) != shape:
            raise CheckpointError(
                f"{self._weights}: tensor {name} has shape {list(stored)}, this model's weight "
                f"{list(shape)}: the adapter is for another base model, or a larger vocabulary."
            )
        return shape is not None

    def _check_module(self, module: str) -> None:
        if module not in self._shapes:
            raise CheckpointError(
                f"{self._weights}: the adapter changes {module}, which is not a linear layer of "
                f"this model.{self._trained_on()}"
            )
        if module not in self._modules.targeted:
            raise CheckpointError(
                f"{self._weights}: contains tensors of {module}, which is not in the target_modules "
                f"of {self.config.file.name}."
            )

    def _check_shapes(self, module: str, pair: Mapping[str, str], max_rank: int) -> None:
        rank = self._modules.ranks[module]
        if rank > max_rank:
            largest = max(self._modules.ranks.get(each, 0) for each in self._tensors)
            advice = f"Start the engine with --max-lora-rank {largest}"
            if largest > MAX_RANK:
                advice = f"--max-lora-rank is limited to {MAX_RANK}"
            raise CheckpointError(
                f"{self.config.file}: {module} has rank {rank}, above the engine's maximum of "
                f"{max_rank}. {advice}."
            )
        num_out, num_in = self._shapes[module]
        for letter, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            stored = self._stored[pair[letter]].shape
            if tuple(stored) != shape:
                why = f"The adapter is for another base model.{self._trained_on()}"
                if len(stored) == 2 and stored[letter == "A"] == shape[letter == "A"]:
                    why = f"The ranks in {self.config.file.name} do not match the weights."
                raise CheckpointError(
                    f"{self._weights}: lora_{letter} of {module} has shape {list(stored)}; with "
                    f"rank {rank} and the model's weight of {[num_out, num_in]} it must be "
                    f"{list(shape)}. {why}"
                )

    def _check_complete(self) -> None:
        missing = [
            module
            for module in self._shapes
            if module in self._modules.targeted and module not in self._tensors
        ]
        if missing:
            raise CheckpointError(
                f"{self._weights}: {len(missing)} modules that {self.config.file.name} targets have "
                f"no tensors: {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}. The "
                "file is incomplete, or for another base model."
            )

    def _trained_on(self) -> str:
        return f" It was trained on {self.config.base}." if self.config.base else ""

    def stored(self, name: str) -> StoredAdapter:
        """Read the weights as stored, unscaled, for Bank.pack."""
        arrays = self._arrays()
        for each, array in arrays.items():
            if self._stored[each].format not in TYPES:
                arrays[each] = self._tensor(each, array).float().numpy()
        modules = {
            module: StoredWeights(
                arrays[pair["A"]], arrays[pair["B"]], self._modules.scalings[module]
            )
            for module, pair in self._tensors.items()
        }
        self._check_unchanged()
        return StoredAdapter(name, modules, str(self._weights))

    def _arrays(self) -> dict[str, Array]:
        names = [each for pair in self._tensors.values() for each in pair.values()]
        tensors = {each: self._stored[each] for each in names}
        return read_arrays(self._weights, tensors, self._opener)

    def _check_unchanged(self) -> None:
        """Raise if a file changed since its header was checked."""
        if version_of(self.config.file, self._weights, opener=self._opener) != self.version:
            raise CheckpointError(
                f"{self._weights.parent}: was changed while it was read. Load the adapter after its "
                "files are written, or write them elsewhere and move the folder here."
            )

    def read(self, name: str) -> Adapter:
        """Read the weights into new memory and scale them. Raises for values that are not finite."""
        return Adapter(name, dict(self._scaled()))

    def _scaled(self) -> Iterator[tuple[str, LoraWeights]]:
        arrays = self._arrays()
        for module, pair in self._tensors.items():
            down, up = (self._tensor(pair[letter], arrays[pair[letter]]) for letter in "AB")
            scaled = up * self._modules.scalings[module]
            if not (_finite(down) and _finite(scaled)):
                raise not_finite(str(self._weights), module)
            yield module, LoraWeights(down, scaled)

    def _tensor(self, name: str, array: Array) -> Tensor:
        """A copy of a stored tensor."""
        import torch

        stored = self._stored[name]
        if stored.format not in _DTYPES:
            raise UnsupportedError(
                f"{self._weights}: tensor {name} is stored as {stored.format}; adapter weights must be "
                f"floating point ({', '.join(_DTYPES)})."
            )
        values = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return values.view(getattr(torch, _DTYPES[stored.format])).view(stored.shape)


def _finite(values: Tensor) -> bool:
    """Whether all values are finite. Minimum and maximum are both NaN if any value is NaN."""
    return all(math.isfinite(value) for value in values.aminmax())


def _existing(folder: Path, name: str, opener: Opener | None) -> Path:
    content = _content(folder, opener)
    if name in content:
        return folder / name
    if name == WEIGHTS and _PICKLE in content:
        raise UnsupportedError(
            f"{folder / _PICKLE}: pickle is never loaded, since it can run any code. Save the "
            f"adapter as {WEIGHTS} (PEFT does so by default)."
        )
    some = ", ".join(sorted(content)[:10]) or "nothing"
    raise CheckpointError(f"adapter {folder}: has no {name}; the folder contains {some}.")


def _content(folder: Path, opener: Opener | None) -> list[str]:
    """Names of the files in a folder. Raises CheckpointError for other paths."""
    try:
        if opener is None:
            return os.listdir(folder)
        descriptor = opener(str(folder), os.O_RDONLY)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"adapter {folder}: no such folder.") from None
    except OSError as error:
        raise CheckpointError(
            f"adapter {folder}: cannot be read: {error.strerror or error}."
        ) from error


def read_adapter(folder: Path, name: str, hparams: HParams, max_rank: int) -> Adapter:
    """Read an adapter's folder for a model. Raises if the adapter does not fit the model."""
    return AdapterFolder(folder, hparams, max_rank).read(name)
