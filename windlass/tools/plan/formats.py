"""The forms that a model's weights can be held in, weighed exactly: each is a network without storage.

Headers are read, weights are not. A GPU that is not in this machine can be planned for: there every
form stays packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from windlass.config import ModelConfig, Quantization
from windlass.errors import ConfigError, UnsupportedError
from windlass.kernels.batch import Heads
from windlass.kernels.linears import Linears, PackedGemm
from windlass.kernels.ops import choose_ops
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.plain_linear import ReferenceGemm
from windlass.kernels.select import Need
from windlass.layers.embedding import PackedEmbedding
from windlass.layers.linear import Linear
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.methods import choose_methods
from windlass.models.network import Network, Parts, make_network
from windlass.quant.detect import detect
from windlass.quant.file_dtype import FileDtype
from windlass.quant.unquantised import Unquantised
from windlass.runner.device import choose_dtype
from windlass.tools.common.device import traffic_of
from windlass.tools.plan.quality import REFERENCE, Retention, typical_gguf, typical_stored

STORED = "as stored"
HALF = "16 bit"
HEAD = "+head"
ONLINE: tuple[str, ...] = get_args(Quantization)
FORMATS = (STORED, HALF, *(name + head for name in ONLINE for head in ("", HEAD)))
_ANY_LAYER = "model.layers.0.mlp.down_proj"
# The plain version writes and reads float32 copies of a weight several times on each call.
_UNPACKING_BYTES = 24
_ROWS = 128  # a multiple of every kernel's tile, and of the blocks that share a scale
_BY_ROW = ("codes", "scales", "mins", "sub_scales")


@dataclass(frozen=True, slots=True)
class Target:
    """The device to plan for. `present`: it is in this machine, so that its kernels can be asked."""

    device: torch.device
    present: bool


@dataclass(frozen=True, slots=True)
class Weighed:
    """One format of a model's weights."""

    name: str  # one of FORMATS
    options: dict[str, Any]  # what `serve` must be told for it
    held: str  # "int4, groups of 128: 210; bfloat16: 1", by number of weights
    weight_bytes: int
    read_bytes: int  # that a decode step reads, or writes and reads to unpack
    num_weights: int  # that every token is multiplied with
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Weighing:
    """All formats that the model can have, and why it cannot have the others."""

    formats: list[Weighed]
    refused: dict[str, str]
    stored: str  # "bfloat16", "awq", "Q4_1, Q8_0"
    quality: Retention  # of the weights as they are stored


def check_names(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise ConfigError(
            f"--formats: {', '.join(map(repr, unknown)) or 'nothing'} is not a format. "
            f"Known: {', '.join(FORMATS)}."
        )


def weigh(
    config: ModelConfig, hparams: HParams, checkpoint: Checkpoint, target: Target,
    names: Sequence[str] = FORMATS,
) -> Weighing:  # fmt: skip
    """Make the network in every format that was asked for, without reading a weight."""
    check_names(names)
    made = _Maker(config, hparams, checkpoint, target)
    stored, choice = made.stored()
    refused: dict[str, str] = {}
    formats = [stored] if STORED in names else []
    quantised = made.quantised
    same = HALF if stored.dtype.itemsize == 2 and not quantised else None
    for name in names:
        if name == STORED:
            continue
        if name == same:
            refused[name] = f"the same as {STORED!r}"
            continue
        if quantised:
            refused[name] = (
                f"the weights are quantised already ({choice}), and the original ones are not there"
            )
            continue
        try:
            formats.append(made.make(name, _options(name)))
        except (ConfigError, UnsupportedError) as error:
            refused[name] = str(error)
    return Weighing(formats, refused, choice, made.quality() if quantised else REFERENCE)


def _options(name: str) -> dict[str, Any]:
    if name == HALF:
        return {"dtype": "bfloat16"}
    options: dict[str, Any] = {"quantization": name.removesuffix(HEAD)}
    return options | ({"quantize_head": True} if name.endswith(HEAD) else {})


@dataclass(frozen=True, slots=True)
class _Counts:
    """What a network takes, or a part of it."""

    weight_bytes: int
    read_bytes: int
    num_weights: int
    held: Counter[str]

    def extended(self, longer: _Counts, times: int) -> _Counts:
        """With what `longer` has more, so many times."""
        forms = Counter(
            {form: self.held[form] + times * (longer.held[form] - self.held[form])
             for form in longer.held}
        )  # fmt: skip
        return _Counts(
            self.weight_bytes + times * (longer.weight_bytes - self.weight_bytes),
            self.read_bytes + times * (longer.read_bytes - self.read_bytes),
            self.num_weights + times * (longer.num_weights - self.num_weights),
            forms,
        )

    def weighed(self, name: str, options: dict[str, Any], dtype: torch.dtype) -> Weighed:
        held = "; ".join(f"{form}: {count}" for form, count in self.held.most_common())
        sizes = (self.weight_bytes, self.read_bytes, self.num_weights)
        return Weighed(name, options, held, *sizes, dtype)


@dataclass(frozen=True, slots=True)
class _Outlined:
    """A network without storage."""

    network: Network
    layers: list[Linear]
    linears: Linears
    choice: str


class _Maker:
    """Makes networks of one model without storage."""

    def __init__(
        self, config: ModelConfig, hparams: HParams, checkpoint: Checkpoint, target: Target
    ) -> None:
        self._config = replace(config, quantization=None, quantize_head=False)
        self._hparams = hparams
        self._checkpoint = checkpoint
        self._target = target
        self.quantised = False  # known once the stored ones were looked at

    def stored(self) -> tuple[Weighed, str]:
        """The weights as they are in the file, and what that is. Layers may differ there."""
        made = self._outlined(self._config, self._hparams)
        self.quantised = any(_is_quantised(layer) for layer in made.layers)
        return self._counts(made).weighed(STORED, {}, made.linears.dtype), made.choice

    def make(self, name: str, options: dict[str, Any]) -> Weighed:
        """Layers are all alike in other formats: one and two of them tell what all take."""
        config, hparams = replace(self._config, **options), self._hparams
        one, two = (
            self._outlined(
                config, replace(hparams, num_layers=number, sliding_windows=(None,) * number)
            )
            for number in (1, 2)
        )
        counts = self._counts(one).extended(self._counts(two), hparams.num_layers - 1)
        return counts.weighed(name, options, one.linears.dtype)

    def _outlined(self, config: ModelConfig, hparams: HParams) -> _Outlined:
        dtype, _ = choose_dtype(config, hparams, self._target.device)
        linears = self._linears(config, dtype)
        methods = choose_methods(config, hparams, self._checkpoint, linears)
        parts = self._parts(dtype, methods.method_for)
        parts = replace(parts, table_dtype=methods.table_dtype, table_method=methods.table_method)
        network = make_network(hparams, parts)
        outline(network)
        layers = [module for module in network.modules() if isinstance(module, Linear)]
        return _Outlined(network, layers, linears, methods.choice.value)

    def quality(self) -> Retention:
        """What is typical of the stored format."""
        linears = self._linears(self._config, torch.float32)
        found = detect(self._hparams.quantization, self._hparams.source, linears)
        method = found.method(_ANY_LAYER) if found is not None else None
        if found is not None and method is not None:
            return typical_stored(found.name, method.scheme)
        sizes: Counter[str] = Counter()
        for name in self._checkpoint.names():
            stored = self._checkpoint.stored(name)
            sizes[stored.format] += stored.num_bytes
        return typical_gguf(sizes.most_common(1)[0][0] if sizes else "")

    def _linears(self, config: ModelConfig, dtype: torch.dtype) -> Linears:
        """As the engine would make them; kernels of a GPU elsewhere cannot be asked here."""
        return Linears(
            self._target.device,
            dtype,
            plain=config.plain_kernels or not self._target.present,
            reference=config.dtype == "float32",
            round_int4=config.quantization == "w4a8",
        )

    def _parts(self, dtype: torch.dtype, method_for: Any) -> Parts:
        """The rest of a network, as small as can be: only the weights matter."""
        hparams, device = self._hparams, torch.device("cpu")
        heads = Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim)
        ops = choose_ops(Need(device, dtype, heads, hparams.rope.dim, plain=True))
        return Parts(dtype, device, 1, ops, method_for)

    def _counts(self, made: _Outlined) -> _Counts:
        gemm = [product for layer in made.layers for product in layer.gemm]
        weights = [layer.weight for layer in made.layers if layer.weight is not None]
        modules = made.network.modules()
        tables = [item for m in modules if isinstance(m, PackedEmbedding) for item in m.gemm]
        repacked, table_repacked, unpacked = 0, 0, 0
        if self._target.present:
            holder = Holder(made.linears)
            # What kernels make of the forms: their tiles may need more bytes, or less.
            repacked, table_repacked = (
                sum(holder.num_bytes(item) - item.prepared.num_bytes for item in some)
                for some in (gemm, tables)
            )
            unpacked = sum(math.prod(item.shape) for item in gemm if item.kernel == "plain")
        plain = str(made.linears.dtype).removeprefix("torch.")
        return _Counts(
            made.network.weight_bytes + repacked + table_repacked,
            traffic_of(made.network, 0).weight_bytes + repacked + _UNPACKING_BYTES * unpacked,
            sum(math.prod(item.shape) for item in gemm) + sum(weight.numel() for weight in weights),
            Counter([*(_held(product, plain) for product in gemm), *[plain] * len(weights)]),
        )


def _held(product: PackedGemm, plain: str) -> str:
    unpacked = product.kernel == "torch" and product.form != plain
    return f"{product.form}, unpacked" if unpacked else product.form


def _is_quantised(layer: Linear) -> bool:
    """By its file: with no option set, every form but a plain one comes from there."""
    method = layer.method
    if isinstance(method, FileDtype):
        return False
    return not isinstance(method, Unquantised) or method.name != method.form


class Holder:
    """Holds samples with the kernels that are to be used, and remembers weights that are alike."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears
        self._known: dict[tuple[object, ...], int] = {}

    def num_bytes(self, product: PackedGemm) -> int:
        """Of a product without storage, as it would be with it."""
        prepared = product.prepared
        if not isinstance(prepared, ReferenceGemm) or product.kernel == "plain":
            return prepared.num_bytes
        form = prepared.form
        geometry = ((tuple(value.shape), value.dtype) for value in _tensors(form).values())
        key = (type(form), *geometry)
        if key not in self._known:
            self._known[key] = self._measured(form)
        return self._known[key]

    def _measured(self, form: Packed) -> int:
        rows = form.shape[0]
        small, large = (
            self._linears.hold(self._sample(form, count * _ROWS + rows % _ROWS)).prepared.num_bytes
            for count in (1, 2)
        )
        return small + (large - small) * (rows // _ROWS - 1)

    def _sample(self, form: Packed, rows: int) -> Packed:
        changed = {}
        for name, value in _tensors(form).items():
            shape = list(value.shape)
            if name in _BY_ROW and shape[0] == form.shape[0]:
                shape[0] = rows
            elif isinstance(form, Float8) and form.block is not None and name == "scales":
                shape[0] = -(-rows // form.block[0])
            device = self._linears.device
            if name == "order":
                changed[name] = torch.arange(shape[0], device=device).to(value.dtype)
            else:
                changed[name] = torch.ones(shape, device=device).to(value.dtype)
        return replace(form, **changed)  # type: ignore[arg-type]


def _tensors(form: Packed) -> dict[str, Tensor]:
    values = {item.name: getattr(form, item.name) for item in fields(form)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
