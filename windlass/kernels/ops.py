"""The operations that a network is written in, as one bundle that was chosen for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from windlass.core.card import Choice
from windlass.kernels.batch import Heads, LayerKV, StepBatch
from windlass.kernels.batch_invariant_attention import attention as batch_invariant_attention
from windlass.kernels.reference import embedding as plain_embedding
from windlass.kernels.reference import gather as plain_gather
from windlass.kernels.rounded import Outputs, Scaled
from windlass.kernels.select import Need, Selection, select


@dataclass(frozen=True, slots=True)
class Ops:
    """Each function has the contract of its namesake in reference.py."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]  # may update the residual in place
    silu_mul: Callable[..., Tensor]
    rope_write: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    embedding: Callable[..., Tensor] = plain_embedding
    gather: Callable[..., Tensor] = plain_gather
    whole_attention: Callable[..., Tensor] | None = None  # both, where they know of each other
    chosen: tuple[Selection, ...] = ()

    def attend(
        self,
        qkv: Outputs,
        heads: Heads,
        cos_sin: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        kv: LayerKV,
        batch: StepBatch,
        window: int | None = None,
    ) -> Tensor:
        """From the q, k, v product to attention's result; keys and values are written to pages."""
        scale = heads.dim**-0.5
        if self.whole_attention is not None:
            return self.whole_attention(qkv, heads, cos_sin, norms, kv, batch, scale, window)
        if isinstance(qkv, Scaled):
            qkv = qkv.whole()
        queries = self.rope_write(qkv, heads, cos_sin, norms, kv, batch)
        if batch.batch_invariant and batch.work is None and not self.is_native:
            return batch_invariant_attention(queries, kv, batch, scale, window)
        return self.attention(queries, kv, batch, scale, window)

    @property
    def is_triton(self) -> bool:
        """Whether all that has a Triton kernel is one."""
        return all(one.name == "triton" for one in self.chosen if one.operation not in _COPIES)

    @property
    def is_native(self) -> bool:
        """Whether all is the CPU's own: steps can be recorded, and sums are always in one order."""
        return bool(self.chosen) and all(one.name == "native" for one in self.chosen)

    @property
    def backend(self) -> str:
        """Names the kernels; the native library by the digest of its source, flags and CPU."""
        names = sorted({one.name for one in self.chosen})
        if "native" in names:
            from windlass.kernels.native.pool import shared_pool

            names.append(shared_pool().native.path.stem)
        return " ".join(names)

    @property
    def choices(self) -> list[Choice]:
        """For the start-up table: operations that got the same kernels share a line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for one in self.chosen:
            lines.setdefault((one.name, one.reason), []).append(one.operation)
        choices = [
            Choice(f"{name} kernels", ", ".join(ops), why) for (name, why), ops in lines.items()
        ]
        if any(one.name == "native" for one in self.chosen):
            choices.append(_instructions())
        return choices


def _instructions() -> Choice:
    """What of the CPU's own the native library uses, and where that library is from."""
    from windlass.kernels.native.pool import shared_pool

    native = shared_pool().native
    return Choice("CPU instructions", native.simd, native.reason)


_COPIES = ("embedding", "gather")  # no kernel copies rows faster than torch's on a GPU
_OPERATIONS = (*_COPIES, "rms_norm", "add_rms_norm", "silu_mul", "rope_write", "attention")


def choose_ops(need: Need) -> Ops:
    """Select every operation once."""
    chosen = {name: select(name, need) for name in _OPERATIONS}
    functions = {name: selection.function for name, selection in chosen.items()}
    return Ops(**functions, whole_attention=_whole(chosen), chosen=tuple(chosen.values()))


def _whole(chosen: dict[str, Selection]) -> Callable[..., Tensor] | None:
    """Rotation and attention as one, where both would be of the same kind."""
    if not chosen["rope_write"].name == chosen["attention"].name == "triton":
        return None
    from windlass.kernels.triton.attention import attend

    return attend
