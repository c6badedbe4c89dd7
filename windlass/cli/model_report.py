"""Describes a model before it is loaded, as plain JSON values.

Headers are read, weights are not; the network is built of meta tensors to compute its size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from windlass.build import OpenModel, open_model
from windlass.config import EngineConfig
from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.kernels.select import Selection
from windlass.layers.linear import Linear
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.loader import outline
from windlass.models.network import make_network
from windlass.quant.unquantised import Unquantised
from windlass.runner.copies import choose_copies
from windlass.runner.load import make_blueprint
from windlass.text.chat_template import ChatTemplate

Json = dict[str, Any]


def examine(config: EngineConfig, list_tensors: bool = False) -> Json:
    """Open the model of the config and describe it."""
    opened = open_model(config)
    checkpoint = open_checkpoint(opened.files, config.model)
    blueprint = make_blueprint(config, opened.hparams, checkpoint)
    parts = blueprint.parts
    network = make_network(opened.hparams, parts)
    layout = blueprint.kv_format.layout
    copies = choose_copies(config, opened.hparams, network, parts=parts, layout=layout)
    blueprint.linears.copies = copies.made
    outline(network)
    report: Json = {
        "model": _model(opened),
        "spec": asdict(opened.hparams),
        "tokenizer": _tokenizer(opened.card),
        "chat_template": _chat_template(opened.card),
        "sampling_defaults": dict(opened.card.default_sampling),
        "formats": _formats(checkpoint),
        "choices": [
            asdict(item)
            for item in (
                *network.choices,
                *blueprint.choices,
                *copies.choices(network),
                blueprint.kv_format.choice,
            )
        ],
        "kernels": [_kernel(selection) for selection in parts.ops.chosen],
        "linear_layers": _linear_layers(network),
        "estimate": {
            "weight_bytes": network.weight_bytes,
            "table_bytes": network.table_bytes,
            "kv_bytes_per_token": blueprint.kv_format.layout.token_bytes,
            "state_bytes_per_sequence": blueprint.kv_format.layout.state_bytes,
        },
    }
    if list_tensors:
        report["tensors"] = _tensors(checkpoint)
    return report


def _model(opened: OpenModel) -> Json:
    files = opened.files
    weights = [{"path": str(file), "bytes": file.stat().st_size} for file in files.weights]
    return {"name": files.name, "kind": files.kind, "path": str(files.path), "weights": weights}


def _tokenizer(card: ModelCard) -> Json:
    tokenizer = card.tokenizer
    return {
        "kind": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "eos": {str(token): tokenizer.token_text(token) for token in tokenizer.eos_ids},
        "special_tokens": dict(card.special_tokens),
    }


def _chat_template(card: ModelCard) -> Json:
    """Whether there is one, and the result of rendering a few conversations with it."""
    if card.chat_template is None:
        return {"present": False, "error": None, "remarks": []}
    try:
        template = ChatTemplate(card.chat_template, card.special_tokens)
    except ConfigError as error:
        return {"present": True, "error": str(error), "remarks": []}
    return {"present": True, "error": None, "remarks": list(template.warnings)}


def _formats(checkpoint: Checkpoint) -> list[Json]:
    """Count stored tensors by format, the largest share of bytes first."""
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        counts[stored.format] += 1
        num_bytes[stored.format] += stored.num_bytes
    return [
        {"format": name, "tensors": counts[name], "bytes": total}
        for name, total in num_bytes.most_common()
    ]


def _tensors(checkpoint: Checkpoint) -> list[Json]:
    stored = {name: checkpoint.stored(name) for name in checkpoint.names()}
    return [
        {"name": name, "format": item.format, "shape": list(item.shape), "bytes": item.num_bytes}
        for name, item in stored.items()
    ]


def _kernel(selection: Selection) -> Json:
    return {
        "operation": selection.operation,
        "kernel": selection.name,
        "refusals": selection.refusals,
    }


@dataclass(frozen=True, slots=True)
class _WeightKind:
    """Format in the file, form in memory and kernel of a weight; equal for layers of one kind."""

    layer: str  # "model.layers.*.mlp.down_proj"
    method: str
    form: str
    kernel: str
    reason: str
    refusals: tuple[tuple[str, str], ...] = ()


def _linear_layers(network: nn.Module) -> list[Json]:
    """Group linear layers by kind; the same layer of every block is one kind."""
    kinds: dict[_WeightKind, list[tuple[int, int]]] = {}
    for path, module in network.named_modules():
        if isinstance(module, Linear):
            name = ".".join("*" if part.isdigit() else part for part in path.split("."))
            for kind, size in _weights(name, module):
                kinds.setdefault(kind, []).append(size)
    return [
        asdict(kind)
        | {
            "refusals": dict(kind.refusals),
            "layers": len(sizes),
            "bytes": sum(num_bytes for num_bytes, _ in sizes),
            "bits_per_weight": round(
                8 * sum(num_bytes for num_bytes, _ in sizes) / sum(count for _, count in sizes), 2
            ),
        }
        for kind, sizes in kinds.items()
    ]


def _weights(name: str, layer: Linear) -> Iterator[tuple[_WeightKind, tuple[int, int]]]:
    """Yield a layer's matrices, each with its bytes and its number of weights."""
    method = layer.method
    for gemm in layer.gemms:
        kind = _WeightKind(
            layer=name,
            method=method.name,
            form=gemm.form,
            kernel=gemm.kernel,
            reason=gemm.reason,
            refusals=tuple(gemm.refusals.items()),
        )
        yield kind, (gemm.prepared.num_bytes, gemm.shape[0] * gemm.shape[1])
    if layer.weight is not None:
        reason = method.reason if isinstance(method, Unquantised) else ""
        form = str(layer.weight.dtype).removeprefix("torch.")
        kind = _WeightKind(layer=name, method=method.name, form=form, kernel="torch", reason=reason)
        yield kind, (layer.weight.nbytes, layer.weight.numel())
