"""Times the commands of a recorded CPU program, by kind of work.

A step runs command by command instead of by one call. Norms and activations that the program has fused
into a GEMM are part of its time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from windlass.kernels.native.commands import Command, LinearFlag, Op
from windlass.kernels.native.linear import NativeGemm
from windlass.layers.linear import Linear

_KINDS = {
    Op.EMBED: "embedding",
    Op.NORM: "norm",
    Op.ADD_NORM: "norm",
    Op.LAYER_NORM: "norm",
    Op.ADD_LAYER_NORM: "norm",
    Op.LINEAR: "GEMM",
    Op.QUANTISE: "quantisation of inputs",
    Op.SILU_MUL: "activation",
    Op.GELU_MUL: "activation",
    Op.SIGMOID_GATE: "activation",
    Op.SPLIT_GATES: "activation",
    Op.MUL_COLUMNS: "activation",
    Op.MAP: "activation",
    Op.ROPE: "rope and KV write",
    Op.ATTENTION: "attention",
    Op.LATENT: "attention",
    Op.PER_HEAD: "GEMM per head",
    Op.ARGMAX: "sampling",
    Op.SAMPLE: "sampling",
    Op.LORA: "adapters",
    Op.EXPERTS: "experts",
    Op.SPARSE_MIXER: "routing of experts",
    Op.CAUSAL_CONV: "recurrent states",
    Op.SHORT_CONV: "recurrent states",
    Op.SELECTIVE_SCAN: "recurrent states",
    Op.DELTA_RULE: "recurrent states",
    Op.ALL_REDUCE: "communication",
    Op.ALL_GATHER: "communication",
}
_FUSED = {LinearFlag.NORM_FIRST: "norm", LinearFlag.GATED: "activation"}
SCOPE = "windlass: "  # precedes the names in traces
_FLAGS = 2  # index among a GEMM's sizes


@dataclass(slots=True)
class CommandTimes:
    """Receives the commands of steps with their times. `gemms`: names by the address of the weight."""

    gemms: dict[int, str]
    events: list[tuple[str, float, float]] = field(default_factory=list)  # kind, start, seconds

    def add(self, command: Command, start: float, seconds: float) -> None:
        self.events.append((self._kind(command), start, seconds))

    def _kind(self, command: Command) -> str:
        op = Op(command.op)
        if op != Op.LINEAR:
            return _KINDS.get(op, "other")
        name = self.gemms.get(command.model_tensors[0] or 0, "GEMM")
        flags = LinearFlag(command.sizes[_FLAGS])
        fused = [word for flag, word in _FUSED.items() if flags & flag]
        return f"{name} with {' and '.join(fused)}" if fused else name

    def spent(self) -> dict[str, tuple[float, int]]:
        """Microseconds and calls by kind."""
        found: dict[str, tuple[float, int]] = {}
        for kind, _, seconds in self.events:
            us, calls = found.get(kind, (0.0, 0))
            found[kind] = (us + 1e6 * seconds, calls + 1)
        return found

    def write_trace(self, path: Path) -> None:
        """Write the commands for Chrome or Perfetto."""
        path.parent.mkdir(parents=True, exist_ok=True)
        first = self.events[0][1] if self.events else 0.0
        events = [
            {
                "name": f"{SCOPE}{kind}",
                "ph": "X",
                "ts": 1e6 * (start - first),
                "dur": 1e6 * seconds,
                "pid": 0,
                "tid": 0,
            }
            for kind, start, seconds in self.events
        ]
        path.write_text(json.dumps({"traceEvents": events}))


def gemm_names(network: nn.Module) -> dict[int, str]:
    """Names of the native GEMMs of a network's linear layers, by the address of their weights."""
    names = {}
    for path, module in network.named_modules():
        if not isinstance(module, Linear):
            continue
        for gemm in module.gemms:
            if isinstance(gemm.prepared, NativeGemm):
                shape = f"{sum(module.parts.values())}x{module.num_in}"
                names[gemm.prepared.address] = f"GEMM {path.rpartition('.')[2]} {shape}"
    return names
