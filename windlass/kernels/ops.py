"""The operations that a network is written in, as one bundle that was chosen for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from windlass.core.card import Choice
from windlass.kernels.select import Need, Selection, select


@dataclass(frozen=True, slots=True)
class Ops:
    """Each function has the contract of its namesake in reference.py."""

    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]  # may update the residual in place
    silu_mul: Callable[..., Tensor]
    rope_write: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    chosen: tuple[Selection, ...] = ()

    @property
    def choices(self) -> list[Choice]:
        """For the start-up table: operations that got the same kernels share a line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for one in self.chosen:
            lines.setdefault((one.name, one.reason), []).append(one.operation)
        return [
            Choice(f"{name} kernels", ", ".join(ops), why) for (name, why), ops in lines.items()
        ]


_OPERATIONS = ("rms_norm", "add_rms_norm", "silu_mul", "rope_write", "attention")


def choose_ops(need: Need) -> Ops:
    """Select every operation once."""
    chosen = {name: select(name, need) for name in _OPERATIONS}
    functions = {name: selection.function for name, selection in chosen.items()}
    return Ops(**functions, chosen=tuple(chosen.values()))
