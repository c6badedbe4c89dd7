"""`windlass quantize` from the model's files to a new checkpoint, layer by layer."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.config import ModelConfig
from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.models.card import load_card, load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.json_file import merged
from windlass.models.source import ModelFiles, resolve
from windlass.runner.device import choose_device, choose_threads
from windlass.text.chat_template import ChatTemplate
from windlass.tools.quantize import described, layouts
from windlass.tools.quantize.calibration import Calibration, SampleOptions, calibrate
from windlass.tools.quantize.layer import Hidden, Layer, rounded_to
from windlass.tools.quantize.methods import Quantised, input_rounding, quantise
from windlass.tools.quantize.partial import Partial
from windlass.tools.quantize.recipe import CALIBRATED, QuantizeOptions, Recipe, decide
from windlass.tools.quantize.weights import Float8Weight, IntWeight, QuantisedWeight, TableWeight
from windlass.tools.resumable import check_output

Log = Callable[[str], None]
Progress = Callable[[int, int, str], None]  # layers done, of how many, what the last one was like

_LAYERS = "model.layers."


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What was asked for."""

    model: ModelConfig
    wishes: QuantizeOptions
    output: Path
    calibration: Path | None
    choice: SampleOptions


@dataclass(frozen=True, slots=True)
class _Source:
    """The model that is quantised."""

    files: ModelFiles
    hparams: HParams
    config: dict[str, Any]
    checkpoint: Checkpoint


def run(order: QuantizeJob, log: Log, progress: Progress) -> dict[str, Any]:
    """Make the checkpoint, or go on making it; returns what quality.json says."""
    _check(order)
    files = resolve(order.model)
    source = _Source(
        files,
        load_hparams(files, order.model),
        merged(described.source_config(files), order.model.hf_overrides),
        open_checkpoint(files, order.model),
    )
    recipe = decide(order.wishes, source.hparams)
    device = choose_device(order.model).device
    choose_threads(order.model)
    for note in [*recipe.notes, *_twice(source)]:
        log(note)
    calibration = _calibration(order, load_card(files, order.model))
    for note in calibration.notes if calibration else ():
        log(f"calibration: {note}")
    fingerprint = _fingerprint(order, source, recipe, calibration)
    with closing(Partial(order.output, fingerprint, source.hparams.num_layers)) as partial:
        if partial.num_done:
            log(f"going on after {partial.num_done} layers that {partial.folder} holds")
        maker = _Maker(source, recipe, device, partial)
        seconds = maker.layers(calibration, progress)
        report = _report(recipe, calibration, source, partial.reports, seconds)

        def write_rest(folder: Path) -> None:
            described.write_config(folder, source.config, recipe)
            described.write_text_files(folder, files, order.model.tokenizer)
            described.write_quality(folder, report)

        partial.finish(maker.outer(), write_rest)
    return report


def _check(order: QuantizeJob) -> None:
    """What can be refused before any file of the model is looked at."""
    check_output(order.output)
    method, choice = order.wishes.method, order.choice
    if method in CALIBRATED and order.calibration is None:
        raise ConfigError(
            f"--method {method} needs --calibration FILE.jsonl, with lines such as "
            '{"text": "..."} or {"messages": [...]}; windlass serve --record-traffic writes one.'
        )
    if choice.num_samples is not None and choice.num_samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {choice.num_samples}.")
    if choice.sample_tokens < 16:
        raise ConfigError(f"--sample-tokens must be at least 16, got {choice.sample_tokens}.")


def _twice(source: _Source) -> list[str]:
    """A warning for a source that has lost precision before."""
    name = "model.layers.0.mlp.down_proj.weight"
    stored = source.checkpoint.stored(name).format
    if stored in ("f32", "f16", "bf16"):
        return []
    return [f"the source's weights are {stored} already: what they lost stays lost"]


def _calibration(order: QuantizeJob, card: ModelCard) -> Calibration | None:
    if order.calibration is None:
        return None

    @cache
    def template() -> ChatTemplate:
        if card.chat_template is None:
            raise ConfigError(
                f"{order.calibration} has conversations, and {card.name} has no chat template. "
                "Give texts instead."
            )
        return ChatTemplate(card.chat_template, card.special_tokens)

    if order.choice.sample_tokens > card.max_positions:
        raise ConfigError(
            f"--sample-tokens {order.choice.sample_tokens} is more than the model's "
            f"{card.max_positions} positions."
        )
    return calibrate(order.calibration, order.choice, card.tokenizer, template)


def _fingerprint(
    order: QuantizeJob, source: _Source, recipe: Recipe, calibration: Calibration | None
) -> dict[str, Any]:
    """All that the result depends on, under the names of the flags where there are such."""
    files = source.files
    choices = {name: value for name, value in asdict(recipe).items() if name != "notes"}
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.weights]
    return {
        **choices,
        "dtype": str(recipe.dtype).removeprefix("torch."),
        "model": [str(files.path.resolve()), *map(list, weights)],
        "hf_overrides": dict(order.model.hf_overrides),
        "calibration": calibration.sha256 if calibration else None,
        "samples": len(calibration.samples) if calibration else None,
        "sample_tokens": order.choice.sample_tokens if calibration else None,
        "tokens": _digest(calibration.samples) if calibration else None,
        "windlass": importlib.metadata.version("windlass"),
    }


def _digest(samples: list[list[int]]) -> str:
    """Changes with the tokenizer, the template and the choice."""
    return sha256(repr(samples).encode()).hexdigest()[:16]


class _Maker:
    """Walks through the layers."""

    def __init__(
        self, source: _Source, recipe: Recipe, device: torch.device, partial: Partial
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._device = device
        self._partial = partial

    def layers(self, calibration: Calibration | None, progress: Progress) -> float:
        """Quantise what is not done yet; returns the seconds it took."""
        hparams, partial = self._source.hparams, self._partial
        began = time.monotonic()
        hidden = partial.hidden()
        if calibration is not None and hidden is None:
            hidden = self._embed(calibration.samples)
            partial.start(hidden)
        progress(partial.num_done, hparams.num_layers, "")
        for index in range(partial.num_done, hparams.num_layers):
            layer = Layer(index, hparams, self._device)
            layer.read(self._source.checkpoint, self._recipe.dtype)
            inputs = layer.watch(hidden) if hidden is not None else None
            made = quantise(layer, inputs, self._recipe)
            if hidden is not None:
                hidden = layer.run(hidden, input_rounding(self._recipe))
            report = {"layer": index, "linears": made.quality}
            partial.add(self._tensors(layer, made), report, hidden)
            progress(index + 1, hparams.num_layers, _in_words(report))
        return time.monotonic() - began

    def _embed(self, samples: list[list[int]]) -> Hidden:
        hparams = self._source.hparams
        shape = (hparams.vocab_size, hparams.hidden_size)
        table = self._source.checkpoint.read("model.embed_tokens.weight", shape)
        ids = torch.tensor([token for sample in samples for token in sample])
        if int(ids.max()) >= hparams.vocab_size:
            raise ConfigError(
                f"the tokenizer gives the id {int(ids.max())}, the model has {hparams.vocab_size}. "
                "They do not belong together; look at --tokenizer."
            )
        return Hidden(table[ids].float(), tuple(map(len, samples)))

    def _tensors(self, layer: Layer, made: Quantised) -> dict[str, Tensor]:
        """The layer's part of the file."""
        tensors: dict[str, Tensor] = {}
        for name, weight in made.weights.items():
            packed = packed_for(self._recipe, weight)
            tensors |= {f"{layer.prefix}{name}.{key}": value for key, value in packed.items()}
        for path, module in layer.block.named_modules():
            if isinstance(module, Linear):
                tensors |= self._biases(layer, path, module)
                continue
            for name, value in module.named_parameters(recurse=False):
                tensors[f"{layer.prefix}{path}.{name}"] = value.to(self._recipe.dtype)
        return tensors

    def _biases(self, layer: Layer, path: str, linear: Linear) -> dict[str, Tensor]:
        if linear.bias is None:
            return {}
        parent = path.rpartition(".")[0]
        parts = linear.bias.to(self._recipe.dtype).split(list(linear.parts.values()))
        names = [f"{layer.prefix}{parent}.{part}.bias" for part in linear.parts]
        return dict(zip(names, parts, strict=True))

    def outer(self) -> dict[str, Tensor]:
        """Embedding, last norm and head: as they are, in the file's type."""
        checkpoint, hparams = self._source.checkpoint, self._source.hparams
        names = [name for name in checkpoint.names() if not name.startswith(_LAYERS)]
        if hparams.tie_embeddings:
            names = [name for name in names if name != "lm_head.weight"]
        found = {name: checkpoint.read(name, checkpoint.stored(name).shape) for name in names}
        return {name: rounded_to(each, self._recipe.dtype, name) for name, each in found.items()}


def packed_for(recipe: Recipe, weight: QuantisedWeight) -> dict[str, Tensor]:
    """One weight as the recipe's format stores it."""
    match weight:
        case TableWeight():
            return layouts.bitsandbytes_layout(weight, recipe.dtype)
        case Float8Weight():
            return layouts.compressed_float8(weight, recipe.dtype)
        case IntWeight() if recipe.format == "awq":
            return layouts.awq_layout(weight)
        case IntWeight() if recipe.format == "gptq":
            return layouts.gptq_layout(weight)
        case IntWeight() if recipe.method == "smoothquant":
            return layouts.compressed_int8(weight, recipe.dtype)
    return layouts.compressed_packed(weight, recipe.symmetric, recipe.dtype)


def _report(
    recipe: Recipe,
    calibration: Calibration | None,
    source: _Source,
    layers: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """What quality.json says."""
    choices = {name: value for name, value in asdict(recipe).items() if name != "notes"}
    return {
        **choices,
        "dtype": str(recipe.dtype).removeprefix("torch."),
        "source": source.files.name,
        "calibration": None
        if calibration is None
        else {
            "sha256": calibration.sha256,
            "samples": len(calibration.samples),
            "tokens": sum(map(len, calibration.samples)),
            "notes": list(calibration.notes),
        },
        "mean": mean_errors(layers),
        "layers": layers,
        "seconds": round(seconds, 1),
        "versions": {
            "windlass": importlib.metadata.version("windlass"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def mean_errors(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Over all linear layers: relative squared errors of weights and of outputs."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for quality in layer["linears"].values():
            for name in ("weight_error", "output_error"):
                if name in quality:
                    found.setdefault(name, []).append(quality[name])
    return {name: sum(values) / len(values) for name, values in found.items()}


def _in_words(report: Mapping[str, Any]) -> str:
    means = mean_errors([dict(report)])
    name = "output_error" if "output_error" in means else "weight_error"
    return f"{name.replace('_', ' ')} {means[name]:.2e}"
