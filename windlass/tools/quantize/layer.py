"""Runs one decoder layer over the calibration tokens, and collects statistics of its inputs.

The hidden states of all samples are on the CPU; batches of whole samples run through the layer with a
paged KV cache, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.kernels import gemm_io, reference, torch_attention
from windlass.kernels.batch import KVCache, Span, StepBatch, attention_layout
from windlass.kernels.gemm import Norm
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear
from windlass.layers.moe import MoE
from windlass.layers.rotary import Rotary
from windlass.models.checkpoint import Checkpoint
from windlass.models.decoder import Block
from windlass.models.families.registry import family_of
from windlass.models.hparams import HParams
from windlass.models.methods import is_router
from windlass.models.network import Parts
from windlass.models.rope import frequencies
from windlass.models.tensor_rules import added_when_read, before_reading
from windlass.quant.unquantised import Unquantised
from windlass.tools.quantize.experts import Experts

_BATCH_TOKENS = 4096
_BLOCK_SIZE = 16
_IGNORED = "rotary_emb.inv_freq"  # in old checkpoints; computed from the config
_FLOAT32 = "e_score_correction_bias"  # its differences decide between experts

Hook = Callable[[nn.Module, Tensor], Tensor]


def _ops(hparams: HParams) -> Ops:
    """Reference ops on every device: a kernel's rounding must not affect the calibration."""
    has_fused = hparams.attention_soft_cap is None and not hparams.attention_sinks
    return Ops(
        rms_norm=reference.rms_norm,
        add_rms_norm=reference.add_rms_norm,
        silu_mul=reference.silu_mul,
        attention=torch_attention.attention if has_fused else reference.attention,
    )


class _Hooked(Unquantised):
    """Unquantised GEMMs that pass their inputs to `hook`, and multiply what it returns."""

    def __init__(self, hook: Hook) -> None:
        super().__init__(torch.float32)
        self._hook = hook

    def apply(self, layer: Any, x: gemm_io.Inputs) -> Tensor:
        return super().apply(layer, self._hooked(layer, x))

    def then(
        self, layer: Any, x: gemm_io.Inputs, residual: Tensor, norm: Norm
    ) -> tuple[gemm_io.Inputs, Tensor]:
        return super().then(layer, self._hooked(layer, x), residual, norm)

    def gated(
        self, layer: Any, x: gemm_io.Inputs, silu_mul: Callable[[gemm_io.Outputs], gemm_io.Inputs]
    ) -> gemm_io.Inputs:
        return super().gated(layer, self._hooked(layer, x), silu_mul)

    def _hooked(self, layer: Any, x: gemm_io.Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return self._hook(layer, x)


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden states of all samples."""

    states: Tensor  # [all tokens, hidden] float32 on the CPU
    lengths: tuple[int, ...]

    def batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the first token and the sample lengths of each batch."""
        first, lengths = 0, list[int]()
        for length in self.lengths:
            if lengths and sum(lengths) + length > _BATCH_TOKENS:
                yield first, lengths
                first, lengths = first + sum(lengths), []
            lengths.append(length)
        yield first, lengths


@dataclass(frozen=True, slots=True)
class InputStats:
    """Statistics of one linear layer's inputs over all calibration tokens.

    The Gram matrix gives the exact output error of a changed weight; the inputs are not stored.
    """

    gram: Tensor  # [K, K] mean of x x.T
    mean_abs: Tensor  # [K]
    max_abs: Tensor  # [K]

    def divided(self, scale: Tensor) -> InputStats:
        """Return the statistics after each feature is divided by its scale."""
        gram = self.gram / scale[:, None] / scale[None, :]
        return InputStats(gram, self.mean_abs / scale, self.max_abs / scale)

    def output_error(self, weight: Tensor, changed: Tensor) -> float:
        """Return the mean squared error of the outputs, relative to their mean square."""
        return float(self._energy(weight - changed) / self._energy(weight).clamp(min=1e-30))

    def _energy(self, weight: Tensor) -> Tensor:
        return ((weight @ self.gram) * weight).sum()


class InputCollector:
    """Accumulates the input statistics of one linear layer, batch by batch."""

    def __init__(self, num_in: int, device: torch.device) -> None:
        self._gram = torch.zeros(num_in, num_in, device=device)
        self._sum_abs = torch.zeros(num_in, device=device)
        self._max_abs = torch.zeros(num_in, device=device)
        self.count = 0  # tokens

    def add(self, x: Tensor) -> None:
        """x: [tokens, K]"""
        self._gram.addmm_(x.T, x)
        sizes = x.abs()
        self._sum_abs += sizes.sum(0)
        self._max_abs = torch.maximum(self._max_abs, sizes.amax(0))
        self.count += x.shape[0]

    def result(self) -> InputStats:
        return InputStats(self._gram / self.count, self._sum_abs / self.count, self._max_abs)


class Layer:
    """Owns the float32 weights of one decoder layer, which quantisation changes in place."""

    def __init__(self, index: int, hparams: HParams, device: torch.device) -> None:
        self.index = index
        self.prefix = f"model.layers.{index}."
        self._hparams = hparams
        self._device = device
        self._hook: Hook = lambda _layer, x: x
        self._rules = family_of(hparams.architecture).rules(hparams)
        method = _Hooked(lambda layer, x: self._hook(layer, x))
        plain = Unquantised(torch.float32)
        parts = Parts(
            dtype=torch.float32,
            device=device,
            max_positions=1,
            ops=_ops(hparams),
            method_for=lambda _, names: plain if all(map(is_router, names)) else method,
        )
        with torch.device("meta"):
            self.block = Block(index, hparams, parts)
            if isinstance(self.block.mlp, MoE):
                self.block.mlp.add_module("experts", Experts(hparams, method))

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Load the block; tensors that stay unquantised are cast to the file's dtype."""
        used: set[str] = set()
        for path, module in self.block.named_modules():
            for name, parts in _stored_names(f"{self.prefix}{path}", module).items():
                read = [_checked(checkpoint.read(full, shape), full) for full, shape in parts]
                used.update(full for full, _ in parts)
                whole = torch.cat(read) if len(read) > 1 else read[0]
                if name != "weight" or not self._is_quantised(module):
                    whole = self.as_read(parts[0][0], whole, dtype)
                wide = whole.to(self._device, torch.float32)
                setattr(module, name, nn.Parameter(wide, requires_grad=False))
        own = [name for name in checkpoint.names() if name.startswith(self.prefix)]
        left = [name for name in own if name not in used and not name.endswith(_IGNORED)]
        if left:
            raise CheckpointError(f"layer {self.index} has unknown tensors: {', '.join(left[:5])}.")

    def as_stored(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """An unquantised tensor as the file of that dtype has it."""
        if name.endswith(_FLOAT32):
            dtype = torch.float32
        return cast_checked(before_reading(name, tensor, self._rules), dtype, name)

    def as_read(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """An unquantised tensor as a reader of the file gets it."""
        stored = self.as_stored(name, tensor, dtype)
        return stored.float() + added_when_read(name, self._rules)

    def _is_quantised(self, module: nn.Module) -> bool:
        return isinstance(module, Linear) and not all(map(is_router, module.parts))

    @property
    def linears(self) -> dict[str, Linear]:
        """The layers to quantise, by path in the block: "self_attn.qkv_proj"."""
        found = {p: m for p, m in self.block.named_modules() if isinstance(m, Linear)}
        return {path: linear for path, linear in found.items() if self._is_quantised(linear)}

    @torch.inference_mode()
    def collect(self, hidden: Hidden) -> dict[str, InputStats]:
        """Run the layer, and return the input statistics of each linear layer by path.

        An expert that no token chose has none.
        """
        collectors = {
            linear: InputCollector(linear.num_in, self._device) for linear in self.linears.values()
        }

        def hook(layer: nn.Module, x: Tensor) -> Tensor:
            assert isinstance(layer, Linear)
            collectors[layer].add(x)
            return x

        for _ in self._run(hidden, hook):
            pass
        found = {
            path: collectors[linear].result()
            for path, linear in self.linears.items()
            if collectors[linear].count
        }
        for path, inputs in found.items():
            if not bool(torch.isfinite(inputs.gram).all()):
                raise CheckpointError(
                    f"the inputs of {self.prefix}{path} are not finite (NaN or infinite) on the "
                    "calibration data. The source's weights are damaged, or its config is wrong."
                )
        return found

    @torch.inference_mode()
    def run(self, hidden: Hidden, quantise_inputs: Callable[[Tensor], Tensor] | None) -> Hidden:
        """Return the next layer's inputs. `quantise_inputs` is applied to each GEMM's inputs."""

        def hook(_layer: nn.Module, x: Tensor) -> Tensor:
            return x if quantise_inputs is None else quantise_inputs(x)

        states = torch.cat(list(self._run(hidden, hook)))
        if not bool(torch.isfinite(states).all()):
            raise CheckpointError(
                f"the outputs of layer {self.index} are not finite (NaN or infinite) after "
                "quantisation. Use more bits or smaller groups."
            )
        return Hidden(states, hidden.lengths)

    def _run(self, hidden: Hidden, hook: Hook) -> Iterator[Tensor]:
        self._hook = hook
        cos_sin = self._cos_sin(max(hidden.lengths))
        for first, lengths in hidden.batches():
            batch = self._batch(lengths)
            x = hidden.states[first : first + sum(lengths)].to(self._device)
            norm = self.block.input_layernorm
            _, residual = self.block(*norm.add(x, None), norm, batch, cos_sin)
            yield residual.cpu()

    def _cos_sin(self, max_positions: int) -> Tensor | None:
        rope = self._hparams.rope_of(self.index)
        if rope is None:
            return None
        inv_freq, scale = frequencies(rope, self._hparams.max_positions)
        return Rotary(
            inv_freq=inv_freq, scale=scale, max_positions=max_positions, device=self._device
        ).cos_sin

    def _batch(self, lengths: list[int]) -> StepBatch:
        """Make a batch of whole samples, each with its own KV blocks."""
        hparams, device = self._hparams, self._device
        max_blocks = -(-max(lengths) // _BLOCK_SIZE)
        layout = attention_layout(
            (None,),
            num_kv_heads=hparams.num_kv_heads,
            dim=hparams.head_dim,
            block_size=_BLOCK_SIZE,
            dtype=torch.float32,
        )
        pages = KVCache(
            layout, max_blocks * len(lengths), dtype=torch.float32, device=device
        ).layers[0]
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
        tables = torch.arange(max_blocks * len(lengths), device=device)
        tables = tables.view(len(lengths), max_blocks)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        spans = [Span(start, count, 0) for start, count in zip(starts, lengths, strict=True)]
        return StepBatch(
            positions=positions,
            token_slots=rows,
            tables=tables[None],
            spans=spans,
            kv=[pages] * hparams.num_layers,
        )


def _stored_names(path: str, module: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Map each parameter of a module to the checkpoint tensors that it is made of."""
    if not isinstance(module, Linear):
        own = module.named_parameters(recurse=False)
        return {name: [(f"{path}.{name}", tuple(meta.shape))] for name, meta in own}
    parent = path.rpartition(".")[0]
    parts = module.parts.items()
    names: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "weight": [(f"{parent}.{part}.weight", (num_out, module.num_in)) for part, num_out in parts]
    }
    if module.bias is not None:
        names["bias"] = [(f"{parent}.{part}.bias", (num_out,)) for part, num_out in parts]
    return names


def cast_checked(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast to the file's dtype; raise CheckpointError if values overflow."""
    cast = tensor.to(dtype)
    if bool(torch.isfinite(cast).all()):
        return cast
    kind = str(dtype).removeprefix("torch.")
    raise CheckpointError(
        f"tensor {name} has values up to {tensor.abs().max():g}, which {kind} cannot hold. "
        "Use --format compressed-tensors, which keeps the source's dtype."
    )


def _checked(tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values, so it cannot be quantised. "
            "Download or convert the model again."
        )
    return tensor
