"""Which method each linear layer gets: from the quantization_config, GGUF's types, --quantization.

Decided by the names of modules, before a weight is read.
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
from windlass.quant.gguf import Gguf
from windlass.quant.kept import Kept
from windlass.quant.online import Online
from windlass.quant.packed_method import Dense, Mixed, PackedMethod
from windlass.quant.plain import Plain
from windlass.quant.rounding import SCHEMES, Scheme

_HEAD = "lm_head"
_TABLE = "model.embed_tokens"
_PLAIN_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ANY_LAYER = "model.layers.0.mlp.down_proj"

Method = PackedMethod | Plain
MethodOf = Callable[[str], Method]  # by a module's name: "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods of a network's layers; `choice` is a line for the start-up table."""

    method_of: MethodOf
    linears: Linears
    choice: Choice
    table_dtype: torch.dtype | None = None  # of the embedding's rows, where not the arithmetic's
    table_method: LinearMethod | None = None  # of an untied embedding that stays packed

    def method_for(self, prefix: str, parts: Iterable[str]) -> LinearMethod:
        """One method for a layer of these parts, whatever each of them is stored as."""
        methods = {part: self.method_of(prefix + part) for part in parts}
        distinct = list(dict.fromkeys(methods.values()))
        if len(distinct) == 1:
            return distinct[0]
        if all(isinstance(method, Plain) for method in distinct):
            return self._plain(distinct)
        dense = Dense("not quantised", self.linears)
        return Mixed(
            {p: dense if isinstance(m, Plain) else m for p, m in methods.items()}, self.linears
        )

    def _plain(self, methods: list[Method]) -> Plain:
        plain = [method for method in methods if isinstance(method, Plain)]
        names = " + ".join(dict.fromkeys(method.name for method in plain))
        reasons = "; ".join(dict.fromkeys(method.reason for method in plain))
        return Plain(self.linears.dtype, self.linears.gemm, names, reasons)


def choose_methods(
    config: ModelConfig, hparams: HParams, checkpoint: Checkpoint, linears: Linears
) -> Methods:
    """Detect how the weights are stored, and what is to be done to them."""
    plain = _Plainly(checkpoint, hparams, linears)
    table = plain(_TABLE)

    def chosen(method_of: MethodOf, value: str, reason: str) -> Methods:
        table_dtype = table.dtype if isinstance(table, Kept) else None
        return Methods(method_of, linears, Choice("weights", value, reason), table_dtype)

    found = detect(hparams.quantization, hparams.source, linears)
    types = _quantised_types(checkpoint)
    wish = SCHEMES[config.quantization] if config.quantization else None
    if found is not None:
        _check_flag(config, found, wish)
        by_file = _ByFile(found, plain, linears, bool(checkpoint.names()), hparams.tie_embeddings)
        return chosen(by_file, found.name, "as the checkpoint says")
    if types:
        if wish is not None:
            raise ConfigError(
                f"--quantization {wish.name}: the file is quantised already ({', '.join(types)}), "
                "and rounding twice loses more than it saves. Leave the flag out, or take a "
                "16-bit file of the model."
            )
        by_type = _ByType(checkpoint, plain, linears, hparams.tie_embeddings)
        made = chosen(by_type, ", ".join(types), "the file's types")
        return replace(made, table_method=_table_method(by_type, hparams))
    if wish is not None:
        online = _OnLoading(Online(wish, linears), plain, config.quantize_head)
        return chosen(online, wish.name, "rounded while loading")
    return chosen(plain, plain(_ANY_LAYER).name, plain.reason)


def _table_method(by_type: MethodOf, hparams: HParams) -> LinearMethod | None:
    """How an embedding of its own stays packed; a tied one is the head's weight."""
    method = by_type(_TABLE)
    if hparams.tie_embeddings or not isinstance(method, Gguf):
        return None
    return method if method.gives_rows(hparams.vocab_size, hparams.hidden_size) else None


def _check_flag(config: ModelConfig, found: Format, wish: Scheme | None) -> None:
    """A flag that asks for what the checkpoint is anyway is harmless; any other is refused."""
    method = found.method(_ANY_LAYER)
    if wish is None or method is None:
        return
    has = method.scheme
    same = (has.kind, has.block) == (wish.kind, wish.block)
    # int4 weights may have their activations rounded whoever made them.
    rounds = (has.activation != "none") == (wish.activation != "none") or wish.kind == "int4"
    if not same or not rounds:
        raise ConfigError(
            f"--quantization {wish.name}: the checkpoint is quantised already ({method.name}), and "
            "its original weights are not in it. Leave the flag out, or take the original model."
        )
    if config.quantize_head:
        raise ConfigError(
            f"--quantize-head: the checkpoint is quantised already ({method.name}) and says itself "
            "whether the head is. Leave the flag out, or take the original model."
        )


def _quantised_types(checkpoint: Checkpoint) -> list[str]:
    """Storage types of a GGUF's matrices that are not plain numbers; safetensors have none."""
    names = [name for name in checkpoint.names() if name.endswith(".weight")]
    stored = [checkpoint.stored(name) for name in names]
    found = dict.fromkeys(item.format for item in stored if len(item.shape) == 2)
    return [kind for kind in found if kind.isupper()]


@dataclass(frozen=True, slots=True)
class _Plainly:
    """Plain numbers: in the file's own type where a kernel reads that, else in the arithmetic's."""

    checkpoint: Checkpoint
    hparams: HParams
    linears: Linears
    made: dict[torch.dtype | None, Method] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        dtype = None if self.linears.refuse_plain() else self._stored_as(module)
        if dtype not in self.made:
            linears = self.linears
            own = Plain(linears.dtype, linears.gemm, reason=self.reason)
            self.made[dtype] = own if dtype is None else Kept(dtype, linears)
        return self.made[dtype]

    @property
    def reason(self) -> str:
        return self.linears.refuse_plain() or "not quantised; sums are float32"

    def _stored_as(self, module: str) -> torch.dtype | None:
        """The type in the file; of random weights the config's. None: it is quantised there."""
        tied = module == _HEAD and self.hparams.tie_embeddings
        name = f"{_TABLE if tied else module}.weight"
        names = self.checkpoint.names()
        if not names:
            return getattr(torch, self.hparams.dtype or "float32", None)
        # What is missing the loader will name.
        kind = self.checkpoint.stored(name).format if name in names else "f32"
        return _PLAIN_TYPES.get(kind)


@dataclass(frozen=True, slots=True)
class _ByFile:
    """As a quantization_config says. Random weights are brought into the same form."""

    format: Format
    plain: MethodOf
    linears: Linears
    has_file: bool
    tied: bool
    stand_ins: dict[str, Online] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        method = self.format.method(module)
        if method is None:
            return self.plain(module)
        if module == _HEAD and self.tied:
            raise CheckpointError(
                f"the quantization_config ({self.format.name}) covers {_HEAD}, but "
                "tie_word_embeddings says that it is the embedding's table, which is not "
                "quantised. Set one of them right with --hf-overrides."
            )
        if self.has_file:
            return method
        if method.name not in self.stand_ins:
            self.stand_ins[method.name] = Online(method.scheme, self.linears)
        return self.stand_ins[method.name]


@dataclass(frozen=True, slots=True)
class _ByType:
    """As the types of a GGUF's tensors say; the reader dequantises what no kernel takes."""

    checkpoint: Checkpoint
    plain: MethodOf
    linears: Linears
    tied: bool
    made: dict[tuple[str, bool], Method] = field(default_factory=dict)
    reasons: dict[tuple[str, tuple[int, ...]], str | None] = field(default_factory=dict)

    def __call__(self, module: str) -> Method:
        name = _TABLE if module == _HEAD and self.tied else module
        if f"{name}.weight" not in self.checkpoint.names():
            return self.plain(module)  # the loader will say what is missing
        stored = self.checkpoint.stored(f"{name}.weight")
        kind = stored.format
        if kind in _PLAIN_TYPES:
            return self.plain(module)
        if (kind, stored.shape) not in self.reasons:
            self.reasons[kind, stored.shape] = self._unpacked(kind, stored.shape)
        reason = self.reasons[kind, stored.shape]
        key = (kind, reason is None)
        if key not in self.made:
            if reason is None:
                self.made[key] = Gguf(kind, self.linears)
            else:
                dtype, gemm = self.linears.dtype, self.linears.gemm
                self.made[key] = Plain(dtype, gemm, kind, reason)
        return self.made[key]

    def _unpacked(self, kind: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor is dequantised, or None."""
        outline = Gguf(kind, self.linears).outline(shape[0], shape[1])
        return self.linears.decide(outline).unpacked


@dataclass(frozen=True, slots=True)
class _OnLoading:
    """Every layer in the same way; the head only when asked to, since it matters most."""

    online: Online
    plain: MethodOf
    quantize_head: bool

    def __call__(self, module: str) -> Method:
        if module == _HEAD and not self.quantize_head:
            return self.plain(module)
        return self.online
