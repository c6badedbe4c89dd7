"""Chooses the method of each linear layer: by quantization_config, GGUF types or --quantization.

The choice depends on module names only and precedes the reading of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from windlass.config import ModelConfig
from windlass.core.card import Choice
from windlass.errors import CheckpointError, ConfigError
from windlass.kernels.linears import Linears
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.quant.base import LinearMethod
from windlass.quant.detect import Format, detect
from windlass.quant.file_dtype import FileDtype
from windlass.quant.gguf import Gguf
from windlass.quant.online import Online
from windlass.quant.packed_method import Dense, Mixed, PackedMethod
from windlass.quant.rounding import SCHEMES, Scheme
from windlass.quant.unquantised import Unquantised

_HEAD = "lm_head"  # as networks name it; `HParams.head` is its name in the checkpoint
_TABLE = "model.embed_tokens"
_PER_LAYER_TABLE = "model.per_layer.embed_tokens"
_PLAIN_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ANY_LAYER = "model.layers.0.mlp.down_proj"

Method = PackedMethod | Unquantised
MethodOf = Callable[[str], Method]  # from a module's name: "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods of a network's layers. `choice` is a line of the start-up table."""

    method_of: MethodOf
    linears: Linears
    choice: Choice
    table_dtype: torch.dtype | None = None  # of the embedding; None: the activation dtype
    table_method: PackedMethod | None = None  # of an untied embedding that may stay packed
    per_layer_table_method: PackedMethod | None = None  # the same for the per-layer embeddings

    def method_for(self, prefix: str, parts: Iterable[str]) -> LinearMethod:
        """One method for a layer of these parts, whose formats may differ."""
        methods = {part: self.method_of(prefix + part) for part in parts}
        distinct = list(dict.fromkeys(methods.values()))
        if len(distinct) == 1:
            return distinct[0]
        if all(isinstance(method, Unquantised) for method in distinct):
            return self._plain(distinct)
        dense = Dense("not quantised", self.linears)
        return Mixed(
            {p: dense if isinstance(m, Unquantised) else m for p, m in methods.items()},
            self.linears,
        )

    def _plain(self, methods: list[Method]) -> Unquantised:
        plain = [method for method in methods if isinstance(method, Unquantised)]
        names = " + ".join(dict.fromkeys(method.name for method in plain))
        reasons = "; ".join(dict.fromkeys(method.reason for method in plain))
        return Unquantised(
            dtype=self.linears.dtype, gemm=self.linears.gemm, name=names, reason=reasons
        )


def choose_methods(
    config: ModelConfig, hparams: HParams, checkpoint: Checkpoint, linears: Linears
) -> Methods:
    """Detect the format of the weights and choose the methods."""
    plain = _Unquantised(checkpoint, hparams, linears)
    table = plain(hparams.table)

    def chosen(method_of: MethodOf, value: str, reason: str) -> Methods:
        table_dtype = table.dtype if isinstance(table, FileDtype) else None
        return Methods(
            method_of=lambda module: plain(module) if is_router(module) else method_of(module),
            linears=linears,
            choice=Choice("weights", value, reason),
            table_dtype=table_dtype,
        )

    found = detect(hparams.quantization, hparams.source, linears)
    types = _quantised_types(checkpoint)
    requested = SCHEMES[config.quantization] if config.quantization else None
    if found is not None:
        _check_flag(config, found, requested)
        from_config = _FromConfig(
            format=found,
            plain=plain,
            linears=linears,
            has_weights=bool(checkpoint.names()),
            tied=hparams.tie_embeddings,
            head=hparams.head,
        )
        return chosen(from_config, found.name, "from the quantization_config")
    if types:
        if requested is not None:
            raise ConfigError(
                f"--quantization {requested.name}: the file is quantised already ({', '.join(types)}), "
                "and quantising twice loses more than it saves. Omit the flag, or use a 16-bit "
                "file of the model."
            )
        from_types = _FromGgufTypes(
            checkpoint=checkpoint, plain=plain, linears=linears, tied=hparams.tie_embeddings
        )
        made = chosen(from_types, ", ".join(types), "the file's types")
        per_layer = from_types(_PER_LAYER_TABLE) if hparams.per_layer_inputs else None
        return replace(
            made,
            table_method=_table_method(from_types, hparams),
            per_layer_table_method=per_layer if isinstance(per_layer, Gguf) else None,
        )
    if requested is not None:
        online = _Online(Online(requested, linears), plain, config.quantize_head)
        return chosen(online, requested.name, "quantised while loading")
    return chosen(plain, plain(_ANY_LAYER).name, plain.reason)


def is_router(module: str) -> bool:
    """Whether a module chooses or weights experts: these are small, and never quantised."""
    return module.rpartition(".")[2] in ("gate", "shared_expert_gate")


def _table_method(from_types: MethodOf, hparams: HParams) -> PackedMethod | None:
    """Return the method of an untied embedding that may stay packed. A tied one is the head's weight."""
    method = from_types(hparams.table)
    return method if isinstance(method, Gguf) and not hparams.tie_embeddings else None


def _check_flag(config: ModelConfig, found: Format, requested: Scheme | None) -> None:
    """Raise if --quantization contradicts the checkpoint's own format."""
    method = found.method(_ANY_LAYER)
    if requested is None or method is None:
        return
    scheme = method.scheme
    same = (scheme.kind, scheme.block) == (requested.kind, requested.block)
    # Activations can be quantised for int4 weights from any checkpoint.
    same_activation = (scheme.activation != "none") == (requested.activation != "none")
    if not same or not (same_activation or requested.kind == "int4"):
        raise ConfigError(
            f"--quantization {requested.name}: the checkpoint is quantised already ({method.name}) and "
            "does not contain the original weights. Omit the flag, or use the original model."
        )
    if config.quantize_head:
        raise ConfigError(
            f"--quantize-head: the checkpoint is quantised already ({method.name}), and its config "
            "defines whether the head is. Omit the flag, or use the original model."
        )


def _quantised_types(checkpoint: Checkpoint) -> list[str]:
    """The quantised types of a GGUF's matrices; empty for safetensors."""
    names = [name for name in checkpoint.names() if name.endswith(".weight")]
    stored = [checkpoint.stored(name) for name in names]
    found = dict.fromkeys(item.format for item in stored if len(item.shape) == 2)
    return [kind for kind in found if kind.isupper()]


@dataclass(frozen=True, slots=True)
class _Unquantised:
    """Unquantised: the file's dtype if a kernel reads it, else the activation dtype."""

    checkpoint: Checkpoint
    hparams: HParams
    linears: Linears
    methods: dict[torch.dtype | None, Method] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        dtype = None if self.linears.refuse_unquantised() else self._stored_dtype(module)
        if dtype not in self.methods:
            linears = self.linears
            plain = Unquantised(linears.dtype, linears.gemm, reason=self.reason)
            self.methods[dtype] = plain if dtype is None else FileDtype(dtype, linears)
        return self.methods[dtype]

    @property
    def reason(self) -> str:
        return self.linears.refuse_unquantised() or "not quantised; float32 accumulation"

    def _stored_dtype(self, module: str) -> torch.dtype | None:
        """The dtype in the file, or the config's for random weights. None: quantised in the file."""
        tied = module == _HEAD and self.hparams.tie_embeddings
        own = self.hparams.head if module == _HEAD else module
        name = f"{self.hparams.table if tied else own}.weight"
        names = self.checkpoint.names()
        if not names:
            return getattr(torch, self.hparams.dtype or "float32", None)
        # The loader raises for a missing tensor.
        kind = self.checkpoint.stored(name).format if name in names else "f32"
        return _PLAIN_TYPES.get(kind)


@dataclass(frozen=True, slots=True)
class _FromConfig:
    """From a quantization_config. Random weights are quantised to the same form."""

    format: Format
    plain: MethodOf
    linears: Linears
    has_weights: bool
    tied: bool
    head: str  # the module of the LM head in the checkpoint
    dummy_methods: dict[str, Online] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        method = self.format.method(self.head if module == _HEAD else module)
        if method is None:
            return self.plain(module)
        if module == _HEAD and self.tied:
            raise CheckpointError(
                f"the quantization_config ({self.format.name}) covers {_HEAD}, but with "
                "tie_word_embeddings it is the embedding's table, which is not quantised. "
                "Correct one of them with --hf-overrides."
            )
        if self.has_weights:
            return method
        if method.name not in self.dummy_methods:
            self.dummy_methods[method.name] = Online(method.scheme, self.linears)
        return self.dummy_methods[method.name]


@dataclass(frozen=True, slots=True)
class _FromGgufTypes:
    """From the types of a GGUF's tensors. Types without a kernel are dequantised while reading."""

    checkpoint: Checkpoint
    plain: MethodOf
    linears: Linears
    tied: bool
    methods: dict[tuple[str, bool], Method] = field(default_factory=dict)
    reasons: dict[tuple[str, tuple[int, ...]], str | None] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        name = _TABLE if module == _HEAD and self.tied else module
        if f"{name}.weight" not in self.checkpoint.names():
            return self.plain(module)  # the loader raises for a missing tensor
        stored = self.checkpoint.stored(f"{name}.weight")
        kind = stored.format
        if kind in _PLAIN_TYPES:
            return self.plain(module)
        if (kind, stored.shape) not in self.reasons:
            self.reasons[kind, stored.shape] = self._why_dequantised(kind, stored.shape)
        reason = self.reasons[kind, stored.shape]
        key = (kind, reason is None)
        if key not in self.methods:
            if reason is None:
                self.methods[key] = Gguf(kind, self.linears)
            else:
                dtype, gemm = self.linears.dtype, self.linears.gemm
                self.methods[key] = Unquantised(dtype=dtype, gemm=gemm, name=kind, reason=reason)
        return self.methods[key]

    def _why_dequantised(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor is dequantised; None if it stays packed."""
        outline = Gguf(kind, self.linears).outline(shape[0], shape[1])
        return self.linears.decide(outline).unpacked


@dataclass(frozen=True, slots=True)
class _Online:
    """Online quantisation of every layer; of the head only if requested, as it affects quality most."""

    online: Online
    plain: MethodOf
    quantize_head: bool

    def __call__(self, module: str) -> Method:
        if module == _HEAD and not self.quantize_head:
            return self.plain(module)
        return self.online
