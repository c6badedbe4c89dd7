"""The operations of a network, with the kernel chosen for each on this device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from windlass.core.card import Choice
from windlass.core.mla import LatentHeads
from windlass.kernels import delta as reference_delta
from windlass.kernels import latent as reference_latent
from windlass.kernels import mamba as reference_mamba
from windlass.kernels import recurrent as reference_recurrent
from windlass.kernels import reference
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.batch_invariant_attention import attention as batch_invariant_attention
from windlass.kernels.gemm_io import Outputs, UnscaledOutputs
from windlass.kernels.latent import LatentWeights
from windlass.kernels.native.compiled import Native
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.select import Need, Selection, select


@dataclass(frozen=True, slots=True)
class Ops:
    """Each function has the contract of its namesake in reference.py, or in the file of its mixer."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]  # may update the residual in place
    silu_mul: Callable[..., Tensor]
    rope_write: Callable[..., Tensor] = reference.rope_write
    rotate_queries: Callable[..., Tensor] = reference.rotate_queries
    attention: Callable[..., Tensor] = reference.attention
    latent_queries: Callable[..., Tensor] = reference_latent.latent_queries
    latent_attention: Callable[..., Tensor] = reference_latent.latent_attention
    latent_outputs: Callable[..., Tensor] = reference_latent.latent_outputs
    causal_conv: Callable[..., Tensor] = reference_recurrent.causal_conv
    short_conv: Callable[..., Tensor] = reference_recurrent.short_conv
    selective_scan: Callable[..., Tensor] = reference_mamba.selective_scan
    delta_rule: Callable[..., Tensor] = reference_delta.delta_rule
    embedding: Callable[..., Tensor] = reference.embedding
    gather: Callable[..., Tensor] = reference.gather
    qk_norm: Callable[..., Tensor] = reference.qk_norm  # may update qkv in place
    value_norm: Callable[..., Tensor] = reference.value_norm  # may update qkv in place
    group_norm: Callable[..., Tensor] = reference.group_norm  # may update x in place
    mul_columns: Callable[..., Tensor] = reference.mul_columns
    layer_norm: Callable[..., Tensor] = reference.layer_norm
    # May update the residual in place.
    add_layer_norm: Callable[..., tuple[Tensor, Tensor]] = reference.add_layer_norm
    gelu_mul: Callable[..., Tensor] = reference.gelu_mul
    activate: Callable[..., Tensor] = reference.activate
    sigmoid_gate: Callable[..., Tensor] = reference.sigmoid_gate
    scale_by_top_score: Callable[..., Tensor] = reference.scale_by_top_score
    split_gates: Callable[..., tuple[Tensor, Tensor]] = reference.split_gates
    sparse_mixer: Callable[..., Tensor] = reference.sparse_mixer
    soft_cap: Callable[..., Tensor] = reference.soft_cap
    fused_attention: Callable[..., Tensor] | None = None  # rope_write and attention in one call
    expanded_latent: Callable[..., Tensor] | None = None  # attend_latent of steps with long chunks
    chosen: tuple[Selection, ...] = ()
    native: NativeOps | None = None  # set if any kernel is native; they run on its pool

    def attend(
        self,
        qkv: Outputs,
        heads: Heads,
        rope: RopeOptions,
        kv: LayerKV,
        batch: StepBatch,
        options: AttentionOptions,
    ) -> Tensor:
        """Apply RoPE and attention to the QKV GEMM's outputs; writes keys and values to the pages."""
        if self.fused_attention is not None:
            return self.fused_attention(qkv, heads, rope, kv, batch, options)
        if isinstance(qkv, UnscaledOutputs):
            qkv = qkv.scaled()
        queries = self.rope_write(qkv, heads, rope, kv, batch)
        return self.attend_queries(queries, kv, batch, options)

    def attend_queries(
        self, queries: Tensor, kv: LayerKV, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        """Attention of rotated queries to keys and values that are in their pages."""
        if batch.batch_invariant and batch.work is None and not self.is_native:
            return batch_invariant_attention(queries, kv, batch, options)
        return self.attention(queries, kv, batch, options)

    def attend_latent(
        self,
        projected: Tensor,
        q: Tensor,
        heads: LatentHeads,
        weights: LatentWeights,
        *,
        cos_sin: Tensor,
        kv: LayerKV,
        batch: StepBatch,
        scale: float,
    ) -> Tensor:
        """MLA of the queries in the first columns of q and the latents in the last of `projected`.

        Writes the latents to the pages. Returns [tokens, heads * value dim].
        """
        has_long_chunks = batch.work is not None and batch.work.long is not None
        if has_long_chunks and self.expanded_latent is not None:
            return self.expanded_latent(projected, q, heads, weights, cos_sin, kv, batch, scale)
        queries = self.latent_queries(projected, q, heads, weights, cos_sin, kv, batch)
        mixed = self.latent_attention(queries, kv, batch, scale, heads.rank)
        return self.latent_outputs(mixed, weights, batch)

    @property
    def is_triton(self) -> bool:
        """Whether every operation with a Triton kernel uses it."""
        computed = (each for each in self.chosen if each.operation not in _TORCH_ON_GPU)
        return all(each.name == "triton" for each in computed)

    @property
    def is_native(self) -> bool:
        """Whether all kernels are native CPU kernels: recordable and batch-invariant."""
        return bool(self.chosen) and all(each.name == "native" for each in self.chosen)

    @property
    def backend(self) -> str:
        """Names of the kernels, with the digest of the native library's source, flags and CPU."""
        names = sorted({each.name for each in self.chosen})
        if self.native is not None:
            names.append(self.native.pool.native.path.stem)
        return " ".join(names)

    @property
    def choices(self) -> list[Choice]:
        """Lines of the start-up table; operations with the same kernel share a line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for each in self.chosen:
            lines.setdefault((each.name, each.reason), []).append(each.operation)
        choices = [
            Choice(f"{name} kernels", ", ".join(ops), why) for (name, why), ops in lines.items()
        ]
        if self.native is not None:
            choices.append(_instructions(self.native.pool.native))
        return choices


def _instructions(native: Native) -> Choice:
    """The SIMD instruction set of the native library, and where the library comes from."""
    return Choice("CPU instructions", native.simd, native.reason)


# On a GPU these have no kernels but torch's own.
_TORCH_ON_GPU = (
    "embedding",
    "gather",
    "layer_norm",
    "add_layer_norm",
    "gelu_mul",
    "activate",
    "sigmoid_gate",
    "scale_by_top_score",
    "rotate_queries",
    "value_norm",
    "group_norm",
    "mul_columns",
    "split_gates",
    "sparse_mixer",
    "soft_cap",
)
_OPERATIONS = (*_TORCH_ON_GPU, "rms_norm", "add_rms_norm", "silu_mul")
_ATTENTION = ("qk_norm", "rope_write", "attention")
_RECURRENT = {
    "mamba": ("causal_conv", "selective_scan"),
    "delta": ("causal_conv", "delta_rule"),
    "conv": ("short_conv",),
}
_LATENT_ATTENTION = ("latent_queries", "latent_attention", "latent_outputs")


def choose_ops(need: Need) -> Ops:
    """Select a kernel for every operation."""
    mixers = _LATENT_ATTENTION if need.latent else _ATTENTION
    recurrent = _RECURRENT[need.recurrence] if need.recurrent else ()
    operations = (*_OPERATIONS, *mixers, *recurrent)
    chosen = {name: select(name, need) for name in operations}
    functions = {name: selection.function for name, selection in chosen.items()}
    has_native = any(selection.name == "native" for selection in chosen.values())
    return Ops(
        **functions,
        fused_attention=None if need.latent else _fused_attention(chosen),
        expanded_latent=_expanded_latent(chosen) if need.latent else None,
        chosen=tuple(chosen.values()),
        native=NativeOps(need.workers.pool) if has_native else None,
    )


def _fused_attention(chosen: dict[str, Selection]) -> Callable[..., Tensor] | None:
    """RoPE and attention in one call, if both are Triton kernels."""
    if not chosen["rope_write"].name == chosen["attention"].name == "triton":
        return None
    from windlass.kernels.triton.attention import attend

    return attend


def _expanded_latent(chosen: dict[str, Selection]) -> Callable[..., Tensor] | None:
    """MLA with keys and values of every head, if its operations are Triton kernels."""
    if any(chosen[name].name != "triton" for name in _LATENT_ATTENTION):
        return None
    from windlass.kernels.triton.latent_expanded import attend_latent

    return attend_latent
