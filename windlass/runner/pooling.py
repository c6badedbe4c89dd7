"""Pools hidden states into the vectors of embedding and classification requests.

The vectors are made of the hidden states of ordinary steps: those of a prompt's last position, or the
mean over all positions, which is summed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.config import ModelConfig
from windlass.core.pooling import PoolingParams
from windlass.core.types import SlotId
from windlass.errors import UnsupportedError
from windlass.kernels.storages import Held, held
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from windlass.models.hparams import HParams
from windlass.models.pooling_head import DenseActivation, DenseSpec, FinalActivation
from windlass.models.source import ModelFiles
from windlass.runner.cuda.graphs import CudaBackend, HostCopy
from windlass.runner.inputs import StepInputs

_ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer behind the pooling, in float32."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(torch.nn.functional.linear(x, self.weight, self.bias))


class Pooler:
    """Owns the layers behind the pooling, and the sums of prompts that are pooled in chunks."""

    def __init__(
        self, layers: Sequence[DenseLayer] = (), final: FinalActivation = "normalize"
    ) -> None:
        self._layers = layers
        self._final: FinalActivation = final
        self._sums: dict[SlotId, Tensor] = {}

    def storages(self) -> Iterator[Held]:
        for layer in self._layers:
            yield from held("weights", layer.weight, layer.bias)
        yield from held("tables", *self._sums.values())

    def start(self, inputs: StepInputs, hidden: Tensor, *, gathered: bool) -> PendingVectors:
        """Start to make the vectors of the rows that end their prompts; adds up those that do not.

        `hidden`: of all tokens of the step, or if `gathered`, of the sampled positions.
        """
        rows: list[int] = []
        params: list[PoolingParams] = []
        pooled: list[Tensor] = []
        first_samples = _first_samples(inputs)
        for i, (row, span) in enumerate(zip(inputs.rows, inputs.spans, strict=True)):
            pooling = inputs.facts.pooling(row.slot)
            if pooling is None:
                continue
            if pooling.reads_all:
                part = hidden[span.first : span.first + span.count].sum(0, dtype=torch.float64)
                # Always position 0: prompts with mean pooling do not use the prefix cache.
                total = part if row.start == 0 else self._sums[row.slot] + part
                self._sums[row.slot] = total
            if not row.sample:
                continue
            if pooling.reads_all:
                vector = self._sums.pop(row.slot) / (row.start + row.num_tokens)
            else:
                vector = hidden[first_samples[i] if gathered else span.first + span.count - 1]
            rows.append(i)
            params.append(pooling)
            pooled.append(vector.float())
        if not rows:
            return PendingVectors(rows, params, host_copy=None, final=self._final)
        x = torch.stack(pooled)
        for layer in self._layers:
            x = layer(x)
        return PendingVectors(rows, params, host_copy=_copy_to_host(x), final=self._final)


def _first_samples(inputs: StepInputs) -> dict[int, int]:
    """The first sampled position of each row that samples, as an index into all sampled positions."""
    found, at = {}, 0
    for each in inputs.requests:
        found[each.row] = at
        at += each.num_positions
    return found


class _OnHost:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


def _copy_to_host(tensor: Tensor) -> HostCopy:
    return CudaBackend().copy_to_host(tensor) if tensor.is_cuda else _OnHost(tensor)


class PendingVectors:
    """The vectors of some rows of a step while they are copied to the host."""

    def __init__(
        self,
        rows: list[int],
        params: list[PoolingParams],
        host_copy: HostCopy | None,
        final: FinalActivation,
    ) -> None:
        self._rows = rows
        self._params = params
        self._host_copy = host_copy
        self._final: FinalActivation = final

    def wait(self) -> Mapping[int, bytes]:
        """The float32 numbers of each vector, by row."""
        if self._host_copy is None:
            return {}
        found = self._host_copy.wait().numpy()
        return {
            row: _finished(vector, params, self._final).astype(np.float32).tobytes()
            for row, params, vector in zip(self._rows, self._params, found, strict=True)
        }


def _finished(vector: NDArray[Any], params: PoolingParams, final: FinalActivation) -> NDArray[Any]:
    """Cut a vector to the requested dimensions, then normalise or activate it."""
    vector = vector[: params.dimensions].astype(np.float64)
    if not params.use_activation:
        return vector
    if final == "normalize":
        return vector / max(float(np.linalg.norm(vector)), 1e-12)
    if final == "none":
        return vector
    if final == "sigmoid":
        return 0.5 * (1.0 + np.tanh(0.5 * vector))  # exp would overflow
    grown = np.exp(vector - vector.max())
    return grown / grown.sum()


def load_pooler(
    files: ModelFiles, config: ModelConfig, hparams: HParams, device: torch.device
) -> Pooler:
    """Read the layers behind the pooling."""
    head = hparams.pooling
    if head.tokens is not None:
        weight = _token_difference(files, config, hparams=hparams, tokens=head.tokens)
        layers = [DenseLayer(weight.to(device), None, _ACTIVATIONS["none"])]
        return Pooler(layers, head.final)
    return Pooler([_read(spec, files, config, device) for spec in head.layers], head.final)


def _read(
    spec: DenseSpec, files: ModelFiles, config: ModelConfig, device: torch.device
) -> DenseLayer:
    checkpoint: Checkpoint
    if config.load_format == "dummy":
        checkpoint = open_checkpoint(files, config)
    elif spec.file:
        checkpoint = SafetensorsCheckpoint([Path(spec.file)])
    else:
        checkpoint = SafetensorsCheckpoint(files.weights, files.index)

    def read(name: str, *shape: int) -> Tensor:
        stored = checkpoint.read(f"{spec.name}.{name}", shape)
        return stored.to(device=device, dtype=torch.float32, copy=True)

    bias = read("bias", spec.num_out) if spec.bias else None
    weight = read("weight", spec.num_out, spec.num_in)
    return DenseLayer(weight, bias, _ACTIVATIONS[spec.activation])


def _token_difference(
    files: ModelFiles, config: ModelConfig, hparams: HParams, tokens: tuple[int, int]
) -> Tensor:
    """The row of the LM head whose product is the second token's logit minus the first one's."""
    if hparams.logit_soft_cap is not None:
        raise UnsupportedError(
            f"classifier_from_token: {hparams.architecture} caps its logits, so two of them are not "
            "enough for a score."
        )
    checkpoint = open_checkpoint(files, config)
    name = f"{hparams.table if hparams.tie_embeddings else hparams.head}.weight"
    shape = hparams.vocab_size, hparams.hidden_size
    first, second = (
        checkpoint.read(name, shape, (slice(token, token + 1),)).float() for token in tokens
    )
    return (second - first) * hparams.logit_scale
