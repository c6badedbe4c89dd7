"""One decoder layer in memory: read, run over the calibration tokens, and watched while it runs.

Hidden states of all samples lie on the CPU, one after another; batches of whole samples go through
the layer with real KV pages, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError, UnsupportedError
from windlass.kernels import gemm_io, reference, torch_attention
from windlass.kernels.batch import KVCache, Span, StepBatch
from windlass.kernels.gemm import Norm
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear
from windlass.layers.rotary import Rotary
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.llama import Block
from windlass.models.network import Parts
from windlass.models.rope import frequencies
from windlass.quant.unquantised import Unquantised
from windlass.tools.quantize.statistics import Gathering, Inputs

_BATCH_TOKENS = 4096
_PAGE = 16
_DERIVED = "rotary_emb.inv_freq"  # in old checkpoints; computed from the config

Look = Callable[[nn.Module, Tensor], Tensor]

# The same on every device: no kernel's own rounding should get into the calibration.
_OPS = Ops(
    reference.rms_norm,
    reference.add_rms_norm,
    reference.silu_mul,
    reference.rope_write,
    torch_attention.attention,
)


class _Watched(Unquantised):
    """Plain products that show their inputs to `look`, and take what it returns instead."""

    def __init__(self, look: Look) -> None:
        super().__init__(torch.float32)
        self._look = look

    def apply(self, layer: Any, x: gemm_io.Inputs) -> Tensor:
        return super().apply(layer, self._shown(layer, x))

    def then(
        self, layer: Any, x: gemm_io.Inputs, residual: Tensor, norm: Norm
    ) -> tuple[gemm_io.Inputs, Tensor]:
        return super().then(layer, self._shown(layer, x), residual, norm)

    def gated(
        self, layer: Any, x: gemm_io.Inputs, silu_mul: Callable[[gemm_io.Outputs], gemm_io.Inputs]
    ) -> gemm_io.Inputs:
        return super().gated(layer, self._shown(layer, x), silu_mul)

    def _shown(self, layer: Any, x: gemm_io.Inputs) -> Tensor:
        assert isinstance(x, Tensor)
        return self._look(layer, x)


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden states of all samples."""

    states: Tensor  # [all tokens, hidden] float32 on the CPU
    lengths: tuple[int, ...]

    def batches(self) -> Iterator[tuple[int, list[int]]]:
        """First token and lengths of the samples that go through a layer together."""
        first, lengths = 0, list[int]()
        for length in self.lengths:
            if lengths and sum(lengths) + length > _BATCH_TOKENS:
                yield first, lengths
                first, lengths = first + sum(lengths), []
            lengths.append(length)
        yield first, lengths


class Layer:
    """Owns the float32 weights of one decoder layer, which the methods change in place."""

    def __init__(self, index: int, hparams: HParams, device: torch.device) -> None:
        if hparams.architecture not in _KNOWN:
            raise UnsupportedError(
                f"architecture {hparams.architecture!r} cannot be quantised here. "
                f"Known: {', '.join(_KNOWN)}."
            )
        self.index = index
        self.prefix = f"model.layers.{index}."
        self._hparams = hparams
        self._device = device
        self._look: Look = _no_look
        method = _Watched(lambda layer, x: self._look(layer, x))
        parts = Parts(torch.float32, device, 1, _OPS, lambda *_: method)
        with torch.device("meta"):
            self.block = Block(index, hparams, parts)

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Fill the block; what stays plain is rounded to the file's type, and used so here too."""
        used: set[str] = set()
        for path, module in self.block.named_modules():
            for name, pieces in _wanted(f"{self.prefix}{path}", module).items():
                read = [_checked(checkpoint.read(full, shape), full) for full, shape in pieces]
                used.update(full for full, _ in pieces)
                whole = torch.cat(read) if len(read) > 1 else read[0]
                if not (isinstance(module, Linear) and name == "weight"):
                    whole = rounded_to(whole, dtype, pieces[0][0])
                wide = whole.to(self._device, torch.float32)
                setattr(module, name, nn.Parameter(wide, requires_grad=False))
        own = [name for name in checkpoint.names() if name.startswith(self.prefix)]
        left = [name for name in own if name not in used and not name.endswith(_DERIVED)]
        if left:
            raise CheckpointError(
                f"layer {self.index} has tensors that are not known here: {', '.join(left[:5])}."
            )

    @property
    def linears(self) -> dict[str, Linear]:
        """By path inside the block: "self_attn.qkv_proj"."""
        return {p: m for p, m in self.block.named_modules() if isinstance(m, Linear)}

    @torch.inference_mode()
    def watch(self, hidden: Hidden) -> dict[str, Inputs]:
        """Run, and gather what goes into each linear layer."""
        gathered = {
            linear: Gathering(linear.num_in, self._device) for linear in self.linears.values()
        }

        def look(layer: nn.Module, x: Tensor) -> Tensor:
            assert isinstance(layer, Linear)
            gathered[layer].add(x)
            return x

        for _ in self._run(hidden, look):
            pass
        found = {path: gathered[linear].done() for path, linear in self.linears.items()}
        for path, inputs in found.items():
            if not bool(torch.isfinite(inputs.gram).all()):
                raise CheckpointError(
                    f"the inputs of {self.prefix}{path} are not finite (NaN or infinite) on the "
                    "calibration data. The source's weights are broken, or of another config."
                )
        return found

    @torch.inference_mode()
    def run(self, hidden: Hidden, round_inputs: Callable[[Tensor], Tensor] | None) -> Hidden:
        """The next layer's inputs; `round_inputs` rounds what goes into each product."""

        def look(_layer: nn.Module, x: Tensor) -> Tensor:
            return x if round_inputs is None else round_inputs(x)

        states = torch.cat(list(self._run(hidden, look)))
        if not bool(torch.isfinite(states).all()):
            raise CheckpointError(
                f"the outputs of layer {self.index} are not finite (NaN or infinite) after "
                "quantisation. Use more bits or smaller groups."
            )
        return Hidden(states, hidden.lengths)

    def _run(self, hidden: Hidden, look: Look) -> Iterator[Tensor]:
        self._look = look
        inv_freq, scale = frequencies(self._hparams.rope)
        rotary = Rotary(inv_freq, scale, max(hidden.lengths), self._device)
        for first, lengths in hidden.batches():
            batch = self._batch(lengths)
            x = hidden.states[first : first + sum(lengths)].to(self._device)
            norm = self.block.input_layernorm
            _, residual = self.block(*norm.add(x, None), norm, batch, rotary.cos_sin)
            yield residual.cpu()

    def _batch(self, lengths: list[int]) -> StepBatch:
        """Whole samples side by side, each with pages of its own."""
        hparams, device = self._hparams, self._device
        most = -(-max(lengths) // _PAGE)
        shape = (most * len(lengths), hparams.num_kv_heads, _PAGE, hparams.head_dim)
        pages = KVCache(1, shape, torch.float32, device).layers[0]
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
        tables = torch.arange(most * len(lengths), device=device).view(len(lengths), most)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        spans = [Span(start, count, 0) for start, count in zip(starts, lengths, strict=True)]
        return StepBatch(positions, rows, tables, spans, [pages] * hparams.num_layers)


_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def _no_look(_layer: nn.Module, x: Tensor) -> Tensor:
    return x


def _wanted(path: str, module: nn.Module) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """For each of a module's own parameters the checkpoint's tensors that make it."""
    if not isinstance(module, Linear):
        own = module.named_parameters(recurse=False)
        return {name: [(f"{path}.{name}", tuple(meta.shape))] for name, meta in own}
    parent = path.rpartition(".")[0]
    parts = module.parts.items()
    wanted: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "weight": [(f"{parent}.{part}.weight", (num_out, module.num_in)) for part, num_out in parts]
    }
    if module.bias is not None:
        wanted["bias"] = [(f"{parent}.{part}.bias", (num_out,)) for part, num_out in parts]
    return wanted


def rounded_to(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """In the file's type; one that is too narrow is refused."""
    rounded = tensor.to(dtype)
    if bool(torch.isfinite(rounded).all()):
        return rounded
    kind = str(dtype).removeprefix("torch.")
    raise CheckpointError(
        f"tensor {name} has values up to {tensor.abs().max():g}, which {kind} cannot hold. "
        "Use --format compressed-tensors, which keeps the source's own type."
    )


def _checked(tensor: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"tensor {name} holds NaN or infinite values, so it cannot be quantised. "
            "Fetch the model again, or convert it anew."
        )
    return tensor
