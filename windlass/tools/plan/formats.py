"""The weight formats that a model can have, with their exact sizes in memory.

Each format is a network of meta tensors: headers are read, weights are not. For a GPU that is not in
this machine, sizes are those of the packed forms, before a kernel repacks them.
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
from windlass.kernels.linears import Linears, PackedGemm
from windlass.kernels.ops import choose_ops
from windlass.kernels.packed import Float8, Packed
from windlass.kernels.reference_linear import ReferenceGemm
from windlass.layers.embedding import PackedEmbedding
from windlass.layers.linear import Linear
from windlass.layers.moe import Experts
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import outline
from windlass.models.methods import choose_methods
from windlass.models.network import Network, Parts, kernel_need, make_network
from windlass.models.rank_weights import count_copies
from windlass.quant.detect import detect
from windlass.quant.file_dtype import FileDtype
from windlass.quant.unquantised import Unquantised
from windlass.runner.device import choose_dtype
from windlass.tools.common.device import num_weights, traffic_of
from windlass.tools.plan.quality import REFERENCE, Retention, typical_gguf, typical_stored

STORED = "as stored"
HALF = "16 bit"
HEAD = "+head"
ONLINE: tuple[str, ...] = get_args(Quantization)
FORMATS = (STORED, HALF, *(name + head for name in ONLINE for head in ("", HEAD)))
_ANY_LAYER = "model.layers.0.mlp.down_proj"
# The reference GEMM writes and reads float32 copies of a weight several times per call.
_UNPACKING_BYTES = 24
_SAMPLE_ROWS = 128  # a multiple of every kernel's tile, and of the blocks that share a scale
_BY_ROW = ("codes", "scales", "offsets", "sub_scales")  # tensors with a row per output


@dataclass(frozen=True, slots=True)
class Target:
    """The device to plan for. `present`: it is in this machine, and its kernels can be queried."""

    device: torch.device
    present: bool


@dataclass(frozen=True, slots=True)
class FormatSize:
    """Sizes of a model's weights in one format."""

    name: str  # one of FORMATS
    options: dict[str, Any]  # of `serve`, to select the format
    dtype: torch.dtype
    forms: Counter[str]  # in memory, with their numbers of matrices
    weight_bytes: int
    read_bytes: int  # per decode step; includes writing and reading unpacked copies, not experts
    expert_bytes: int
    num_weights: int  # that each token is multiplied with
    copy_bytes: int  # of 16-bit copies, which are not part of `weight_bytes`

    @property
    def held(self) -> str:
        """int4, groups of 128: 210; bfloat16: 1"""
        return "; ".join(f"{form}: {count}" for form, count in self.forms.most_common())

    def extrapolate(self, longer: FormatSize, times: int) -> FormatSize:
        """Add the difference to `longer`, which has one layer more, this many times."""
        own, other = self.forms, longer.forms
        sizes = {
            name: getattr(self, name) + times * (getattr(longer, name) - getattr(self, name))
            for name in ("weight_bytes", "read_bytes", "expert_bytes", "num_weights", "copy_bytes")
        }
        forms = {form: own[form] + times * (other[form] - own[form]) for form in other}
        return replace(self, forms=Counter(forms), **sizes)


def _options(name: str) -> dict[str, Any]:
    if name == HALF:
        return {"dtype": "bfloat16"}
    options: dict[str, Any] = {"quantization": name.removesuffix(HEAD)}
    return options | ({"quantize_head": True} if name.endswith(HEAD) else {})


@dataclass(frozen=True, slots=True)
class MetaParts:
    """The parts of a network that is counted and never run; `choice` is the format of its weights."""

    parts: Parts
    linears: Linears
    choice: str


def meta_parts(
    config: ModelConfig, hparams: HParams, checkpoint: Checkpoint, target: Target
) -> MetaParts:
    """Choose dtype and formats as the engine would; other kernels are the CPU's reference."""
    dtype, _ = choose_dtype(config, hparams, target.device)
    linears, device = _linears(config, target, dtype), torch.device("cpu")
    methods = choose_methods(config, hparams, checkpoint=checkpoint, linears=linears)
    parts = Parts(
        dtype=dtype,
        device=device,
        max_positions=1,
        ops=choose_ops(kernel_need(hparams, device=device, dtype=dtype, plain=True)),
        method_for=methods.method_for,
        table_dtype=methods.table_dtype,
        table_method=methods.table_method,
        per_layer_table_method=methods.per_layer_table_method,
    )
    return MetaParts(parts=parts, linears=linears, choice=methods.choice.value)


def _linears(config: ModelConfig, target: Target, dtype: torch.dtype) -> Linears:
    """Select kernels as the engine would; the kernels of an absent GPU cannot be queried."""
    return Linears(
        target.device,
        dtype,
        plain=config.plain_kernels or not target.present,
        reference=config.dtype == "float32",
        w4a8=config.quantization == "w4a8",
        copies=bool(config.dequantized_copies),
    )


class FormatSizes:
    """Sizes of the named formats, computed without reading a weight. `refused`: names, and why."""

    def __init__(
        self,
        config: ModelConfig,
        hparams: HParams,
        checkpoint: Checkpoint,
        target: Target,
        names: Sequence[str] = FORMATS,
    ) -> None:
        unknown = [name for name in names if name not in FORMATS]
        if unknown or not names:
            raise ConfigError(
                f"--formats: {', '.join(map(repr, unknown)) or 'nothing'} is not a format. "
                f"Known: {', '.join(FORMATS)}."
            )
        self._config = replace(
            config, quantization=None, quantize_head=False, dequantized_copies=False
        )
        self._hparams = hparams
        self._checkpoint = checkpoint
        self._target = target
        # Layers as stored may differ, so all are counted.
        network, made = self._network(hparams, {})
        stored = self._size(STORED, {}, network, made.linears)
        self.stored = made.choice  # "bfloat16", "awq", "Q4_1, Q8_0"
        quantised = any(_is_quantised(layer) for layer in _linear_layers(network))
        self.quality = self._typical_quality() if quantised else REFERENCE  # as stored
        self.formats = [stored] if STORED in names else []
        self.refused: dict[str, str] = {}
        same = HALF if stored.dtype.itemsize == 2 and not quantised else None
        for name in names:
            if name == same:
                self.refused[name] = f"the same as {STORED!r}"
            elif name != STORED and quantised:
                self.refused[name] = (
                    f"the weights are quantised already ({self.stored}), and the original weights are missing"
                )
            elif name != STORED:
                try:
                    self.formats.append(self._online(name))
                except (ConfigError, UnsupportedError) as error:
                    self.refused[name] = str(error)

    def _online(self, name: str) -> FormatSize:
        """Return the size when quantised while loading. Of equal layers two are enough to count."""
        hparams, options = self._hparams, _options(name)
        differ = hparams.mixes_heads or hparams.num_kv_shared_layers
        if differ or (hparams.moe is not None and len(set(hparams.moe.layers)) > 1):
            network, made = self._network(hparams, options)
            return self._size(name, options, network, made.linears)
        sizes = []
        for count in (1, 2):
            shorter = replace(hparams, num_layers=count, sliding_windows=(None,) * count)
            network, made = self._network(shorter, options)
            sizes.append(self._size(name, options, network, made.linears))
        one, two = sizes
        return one.extrapolate(two, hparams.num_layers - 1)

    def _network(self, hparams: HParams, options: dict[str, Any]) -> tuple[Network, MetaParts]:
        """A network of meta tensors."""
        config = replace(self._config, **options)
        made = meta_parts(config, hparams, checkpoint=self._checkpoint, target=self._target)
        network = make_network(hparams, made.parts)
        outline(network)
        return network, made

    def _typical_quality(self) -> Retention:
        """Return the published retention of the stored format."""
        linears = _linears(self._config, self._target, torch.float32)
        found = detect(self._hparams.quantization, self._hparams.source, linears)
        method = found.method(_ANY_LAYER) if found is not None else None
        if found is not None and method is not None:
            return typical_stored(found.name, method.scheme)
        sizes: Counter[str] = Counter()
        for name in self._checkpoint.names():
            stored = self._checkpoint.stored(name)
            sizes[stored.format] += stored.num_bytes
        return typical_gguf(sizes.most_common(1)[0][0] if sizes else "")

    def _size(
        self, name: str, options: dict[str, Any], network: Network, linears: Linears
    ) -> FormatSize:
        layers, modules = _linear_layers(network), list(network.modules())
        gemms = [gemm for layer in layers for gemm in layer.gemms]
        tables = [item for m in modules if isinstance(m, PackedEmbedding) for item in m.gemms]
        repacked, table_repacked, num_unpacked = 0, 0, 0
        if self._target.present:
            sizes = _RepackedSizes(linears)
            # Kernels repack weights: their tiles may take more bytes, or fewer.
            repacked, table_repacked = (
                sum(sizes.num_bytes(item) - item.prepared.num_bytes for item in some)
                for some in (gemms, tables)
            )
            num_unpacked = sum(math.prod(item.shape) for item in gemms if item.kernel == "plain")
        plain = str(linears.dtype).removeprefix("torch.")
        traffic = traffic_of(network, 0)
        experts = [module for module in modules if isinstance(module, Experts)]
        prepared = [each.down.prepared for each in experts]
        forms = [
            *(_form(gemm, plain) for gemm in gemms),
            *(plain for layer in layers if layer.weight is not None),
            *(f"experts, {each.form}" for each in prepared if each is not None),
        ]
        return FormatSize(
            name=name,
            options=options,
            dtype=linears.dtype,
            forms=Counter(forms),
            weight_bytes=network.weight_bytes + repacked + table_repacked,
            read_bytes=traffic.weight_bytes + repacked + _UNPACKING_BYTES * num_unpacked,
            expert_bytes=traffic.expert_bytes,
            num_weights=num_weights(layers) + sum(each.num_active_weights for each in experts),
            copy_bytes=count_copies([network]) if linears.device.type == "cuda" else 0,
        )


def _linear_layers(network: Network) -> list[Linear]:
    return [module for module in network.modules() if isinstance(module, Linear)]


def _form(gemm: PackedGemm, plain: str) -> str:
    unpacked = gemm.kernel == "torch" and gemm.form != plain
    return f"{gemm.form}, unpacked" if unpacked else gemm.form


def _is_quantised(layer: Linear) -> bool:
    """Whether the file stores it quantised: without options, the file alone decides the form."""
    method = layer.method
    if isinstance(method, FileDtype):
        return False
    return not isinstance(method, Unquantised) or method.name != method.form


class _RepackedSizes:
    """Measures repacked weights on small samples, once per geometry."""

    def __init__(self, linears: Linears) -> None:
        self._linears = linears
        self._known: dict[tuple[object, ...], int] = {}

    def num_bytes(self, gemm: PackedGemm) -> int:
        """Return the bytes that a GEMM of meta tensors would take with storage."""
        prepared = gemm.prepared
        if not isinstance(prepared, ReferenceGemm) or gemm.kernel == "plain":
            return prepared.num_bytes
        form = prepared.form
        geometry = ((tuple(value.shape), value.dtype) for value in _tensors(form).values())
        key = (type(form), *geometry)
        if key not in self._known:
            self._known[key] = self._measure(form)
        return self._known[key]

    def _measure(self, form: Packed) -> int:
        """Repack one and two tiles of rows, and extrapolate."""
        rows = form.shape[0]
        small, large = (
            self._linears.prepare(
                self._sample(form, count * _SAMPLE_ROWS + rows % _SAMPLE_ROWS)
            ).prepared.num_bytes
            for count in (1, 2)
        )
        return small + (large - small) * (rows // _SAMPLE_ROWS - 1)

    def _sample(self, form: Packed, rows: int) -> Packed:
        changed = {}
        for name, value in _tensors(form).items():
            shape = list(value.shape)
            if name in _BY_ROW and shape[0] == form.shape[0]:
                shape[0] = rows
            elif isinstance(form, Float8) and form.block is not None and name == "scales":
                shape[0] = -(-rows // form.block[0])
            device = self._linears.device
            if name == "perm":
                changed[name] = torch.arange(shape[0], device=device).to(value.dtype)
            else:
                changed[name] = torch.ones(shape, device=device).to(value.dtype)
        return replace(form, **changed)  # type: ignore[arg-type]


def _tensors(form: Packed) -> dict[str, Tensor]:
    values = {item.name: getattr(form, item.name) for item in fields(form)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
