"""The linear layers that adapters may change, under the names of the model's files and in the network.

An adapter names modules as transformers does. Rules of the family (models/tensor_rules.py) say what becomes
of a module's weight in the network, and the same becomes of its adapter: a fused projection gives an
adapter of each part, and a factor of the weight is one of the delta.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.registry import module_names
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import ModulePart

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")  # the number of a module's layer


def linear_shapes(hparams: HParams) -> dict[str, tuple[int, int]]:
    """(out, in) of every module of the network that an adapter can change."""
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
        # A recurrent mixer's projections have no adapters: the input projection is stored fused.
        mixer = attention if hparams.has_attention(layer) else {}
        modules = mixer | mlp if hparams.has_dense_mlp(layer) else mixer
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in modules.items()}
    return shapes | {"lm_head": (hparams.vocab_size, hidden)}


def _attention_shapes(hparams: HParams, layer: int) -> dict[str, tuple[int, int]]:
    hidden = hparams.hidden_size
    if hparams.mla is None:
        kv_heads = hparams.kv_heads_of(layer)
        q, kv = hparams.num_heads * kv_heads.dim, kv_heads.num * kv_heads.dim
        shapes = {"q_proj": (2 * q if hparams.attention_gates else q, hidden)}
        if hparams.kv_layer_of(layer) == layer:
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


class AdaptedModules:
    """The modules of a model's files that adapters may change. Owns what was found out about each."""

    def __init__(self, hparams: HParams) -> None:
        if hparams.recurrent is not None and hparams.recurrent.multipliers is None:
            raise UnsupportedError(
                f"{hparams.source}: adapters are not supported, since the weights contain multipliers that the "
                "file does not name. Use the model's safetensors."
            )
        self._shapes = linear_shapes(hparams)
        self._num_layers = hparams.num_layers
        self._names = module_names(hparams)
        self._parts: dict[str, tuple[ModulePart, ...]] = {}
        # Modules of the network whose weight is that of another module of the file.
        self._copies = {
            f"model.layers.{layer}.self_attn.v_proj"
            for layer in range(hparams.num_layers)
            if hparams.keys_are_values and hparams.sliding_windows[layer] is None
        }

    def parts(self, module: str) -> tuple[ModulePart, ...]:
        """What a module of the file is in the network; empty if adapters cannot change it."""
        if module in self._parts:
            return self._parts[module]
        found = () if module in self._copies else tuple(self._names.parts(module))
        if not found or any(
            not part.is_product or part.module not in self._shapes for part in found
        ):
            return ()
        self._parts[module] = found
        return found

    def shape(self, module: str) -> tuple[int, int] | None:
        """(out, in) of a module of the file; None if adapters cannot change it."""
        parts = self.parts(module)
        if not parts:
            return None
        first, (num_out, num_in) = parts[0], self._shapes[parts[0].module]
        return (num_out if first.rows is None else first.rows.groups * first.rows.whole), num_in

    def alike(self, modules: Iterable[str]) -> list[str]:
        """These modules of the file in all layers, and the others that have the network's names."""
        numbers = range(2 * self._num_layers)  # files may count mixers and MLPs as layers
        kinds = {_LAYER.sub("*", module, count=1) for module in modules}
        names = {kind.replace("*", str(number)) for kind in kinds for number in numbers}
        found = {name for name in names if self.parts(name)}
        known = {part.module for name in found for part in self.parts(name)}
        return sorted(found | {name for name in self._shapes.keys() - known if self.parts(name)})


def rows_of(part: ModulePart, up: Any) -> Any:
    """The part's rows of lora_B, an array or a tensor [out, rank]."""
    rows = part.rows
    if rows is None:
        return up
    grouped = up.reshape(rows.groups, rows.whole, up.shape[1])
    return grouped[:, rows.start : rows.stop].reshape(-1, up.shape[1])
