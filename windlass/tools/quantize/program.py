"""`windlass quantize`: makes a quantised checkpoint, layer by layer."""

from __future__ import annotations

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
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from windlass.models.families.registry import family_of
from windlass.models.hparams import HParams
from windlass.models.json_file import merged
from windlass.models.source import ModelFiles, resolve
from windlass.models.tensor_rules import FileNames, before_reading
from windlass.runner.device import choose_device, choose_threads
from windlass.text.chat_template import ChatTemplate
from windlass.tools.quantize import checkpoint_files, layouts
from windlass.tools.quantize.calibration import Calibration, SampleOptions, calibrate
from windlass.tools.quantize.layer import Hidden, Layer, cast_checked
from windlass.tools.quantize.methods import Quantised, activation_quantiser, quantise
from windlass.tools.quantize.partial import PartialCheckpoint
from windlass.tools.quantize.recipe import CALIBRATED, QuantizeOptions, Recipe, decide
from windlass.tools.quantize.weights import Float8Weight, IntWeight, QuantisedWeight, TableWeight
from windlass.tools.resumable import check_output
from windlass.version import __version__

Log = Callable[[str], None]
Progress = Callable[[int, int, str], None]  # layers done, all layers, error of the last layer

_LAYERS = "model.layers."


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Source, options and output of a quantisation."""

    model: ModelConfig
    options: QuantizeOptions
    output: Path
    calibration: Path | None
    samples: SampleOptions


@dataclass(frozen=True, slots=True)
class _Source:
    """The model to quantise."""

    files: ModelFiles
    hparams: HParams
    config: dict[str, Any]
    checkpoint: Checkpoint


def run(job: QuantizeJob, log: Log, progress: Progress) -> dict[str, Any]:
    """Make the checkpoint, or resume; return the contents of quality.json."""
    _check(job)
    files = resolve(job.model)
    source = _Source(
        files=files,
        hparams=load_hparams(files, job.model),
        config=merged(checkpoint_files.source_config(files), job.model.hf_overrides),
        checkpoint=open_checkpoint(files, job.model),
    )
    if source.hparams.transformers is not None:
        raise ConfigError(
            f"windlass quantize supports Windlass' own architectures, not {source.hparams.architecture}. "
            "--quantization quantises the linear layers of any model at load time."
        )
    recipe = decide(job.options, source.hparams)
    device = choose_device(job.model).device
    choose_threads(job.model)
    for note in [*recipe.notes, *_source_warnings(source)]:
        log(note)
    calibration = _calibration(job, load_card(files, job.model))
    for note in calibration.notes if calibration else ():
        log(f"calibration: {note}")
    fingerprint = _fingerprint(job, source, recipe=recipe, calibration=calibration)
    with closing(PartialCheckpoint(job.output, fingerprint, source.hparams.num_layers)) as partial:
        if partial.num_done:
            log(f"resuming after {partial.num_done} layers in {partial.folder}")
        loop = _LayerLoop(source=source, recipe=recipe, device=device, partial=partial)
        seconds = loop.run(calibration, progress)
        if calibration is not None:
            for note in _unused_experts(partial.reports):
                log(note)
        report = _report(recipe, calibration, source, layers=partial.reports, seconds=seconds)

        def write_rest(folder: Path) -> None:
            quantization = checkpoint_files.quantization_config(recipe, source.hparams)
            config = {**source.config, "quantization_config": quantization}
            checkpoint_files.write_config(folder, config, recipe.dtype)
            checkpoint_files.write_text_files(folder, files, job.model.tokenizer)
            checkpoint_files.write_json(folder / "quality.json", report)

        partial.finish(loop.outer(), write_rest)
    return report


def _check(job: QuantizeJob) -> None:
    """Refuse invalid options before any file of the model is read."""
    check_output(job.output)
    method, samples = job.options.method, job.samples
    if method in CALIBRATED and job.calibration is None:
        raise ConfigError(
            f"--method {method} needs --calibration FILE.jsonl, with lines like "
            '{"text": "..."} or {"messages": [...]}; windlass serve --record-traffic writes one.'
        )
    if samples.num_samples is not None and samples.num_samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {samples.num_samples}.")
    if samples.sample_tokens < 16:
        raise ConfigError(f"--sample-tokens must be at least 16, got {samples.sample_tokens}.")


def _source_warnings(source: _Source) -> list[str]:
    """Warn about a source that was quantised before."""
    name = "model.layers.0.self_attn.o_proj.weight"
    stored = source.checkpoint.stored(name).format
    if stored in ("f32", "f16", "bf16"):
        return []
    return [f"the source's weights are {stored} already: that loss remains"]


def _unused_experts(layers: list[dict[str, Any]]) -> list[str]:
    """Say which experts have no statistics."""
    linears = [quality for layer in layers for quality in layer["linears"].values()]
    count = sum("output_error" not in quality for quality in linears)
    if not count:
        return []
    return [
        f"{count} of {len(linears)} linear layers belong to experts that no calibration token "
        "chose: their weights are rounded to nearest"
    ]


def _calibration(job: QuantizeJob, card: ModelCard) -> Calibration | None:
    if job.calibration is None:
        return None

    @cache
    def template() -> ChatTemplate:
        if card.chat_template is None:
            raise ConfigError(
                f"{job.calibration} has conversations, and {card.name} has no chat template. "
                "Give texts instead."
            )
        return ChatTemplate(card.chat_template, card.special_tokens)

    if job.samples.sample_tokens > card.max_positions:
        raise ConfigError(
            f"--sample-tokens {job.samples.sample_tokens} is more than the model's "
            f"{card.max_positions} positions."
        )
    return calibrate(job.calibration, job.samples, card.tokenizer, template)


def _fingerprint(
    job: QuantizeJob, source: _Source, recipe: Recipe, calibration: Calibration | None
) -> dict[str, Any]:
    """Return everything that the result depends on, by flag name where there is a flag."""
    files = source.files
    choices = {name: value for name, value in asdict(recipe).items() if name != "notes"}
    weights = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.weights]
    return {
        **choices,
        "dtype": str(recipe.dtype).removeprefix("torch."),
        "model": [str(files.path.resolve()), *map(list, weights)],
        "hf_overrides": dict(job.model.hf_overrides),
        "calibration": calibration.sha256 if calibration else None,
        "samples": len(calibration.samples) if calibration else None,
        "sample_tokens": job.samples.sample_tokens if calibration else None,
        "tokens": _digest(calibration.samples) if calibration else None,
        "windlass": __version__,
    }


def _digest(samples: list[list[int]]) -> str:
    """Hash the tokens, which depend on tokenizer, template and sample choice."""
    return sha256(repr(samples).encode()).hexdigest()[:16]


class _LayerLoop:
    """Quantises the layers one after another."""

    def __init__(
        self, source: _Source, recipe: Recipe, device: torch.device, partial: PartialCheckpoint
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._device = device
        self._partial = partial
        files, hparams = source.files, source.hparams
        self._rules = family_of(hparams.architecture).rules(hparams)
        is_folder = files.kind == "folder"
        stored = SafetensorsCheckpoint(files.weights, files.index).names() if is_folder else ()
        self._names = FileNames(stored, self._rules)

    def run(self, calibration: Calibration | None, progress: Progress) -> float:
        """Quantise the remaining layers; return the seconds that took."""
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
            inputs = layer.collect(hidden) if hidden is not None else None
            made = quantise(layer, inputs, self._recipe)
            if hidden is not None:
                hidden = layer.run(hidden, activation_quantiser(self._recipe))
            report = {"layer": index, "linears": made.quality}
            partial.add(self._named(self._tensors(layer, made)), report, hidden)
            progress(index + 1, hparams.num_layers, _error_text(report))
        return time.monotonic() - began

    def _embed(self, samples: list[list[int]]) -> Hidden:
        hparams = self._source.hparams
        shape = (hparams.vocab_size, hparams.hidden_size)
        table = self._source.checkpoint.read("model.embed_tokens.weight", shape)
        ids = torch.tensor([token for sample in samples for token in sample])
        if int(ids.max()) >= hparams.vocab_size:
            raise ConfigError(
                f"the tokenizer gives the id {int(ids.max())}, the model has {hparams.vocab_size}. "
                "They do not match; check --tokenizer."
            )
        scale = torch.tensor(hparams.embedding_scale, dtype=self._recipe.dtype).item()
        states = table[ids].float() * scale
        if hparams.learned_positions:
            shape = (hparams.learned_positions, hparams.hidden_size)
            rows = self._source.checkpoint.read("model.embed_positions.weight", shape)
            positions = torch.cat([torch.arange(len(sample)) for sample in samples])
            states += rows[positions].float()
        return Hidden(states, tuple(map(len, samples)))

    def _tensors(self, layer: Layer, made: Quantised) -> dict[str, Tensor]:
        """Return the tensors of a layer in the file, under the network's names."""
        tensors: dict[str, Tensor] = {}
        for name, weight in made.weights.items():
            packed = packed_for(self._recipe, weight)
            tensors |= {f"{layer.prefix}{name}.{key}": value for key, value in packed.items()}
        plain: dict[str, Tensor] = {}
        for path, module in layer.block.named_modules():
            for name, value in module.named_parameters(recurse=False):
                if not isinstance(module, Linear):
                    plain[f"{layer.prefix}{path}.{name}"] = value
                elif name != "weight" or path not in layer.linears:
                    parent = f"{layer.prefix}{path}".rpartition(".")[0]
                    split = value.split(list(module.parts.values()))
                    names = [f"{parent}.{part}.{name}" for part in module.parts]
                    plain |= dict(zip(names, split, strict=True))
        dtype = self._recipe.dtype
        return tensors | {name: layer.as_stored(name, each, dtype) for name, each in plain.items()}

    def outer(self) -> dict[str, Tensor]:
        """Return embedding, final norm and head in the file's dtype."""
        checkpoint, hparams = self._source.checkpoint, self._source.hparams
        names = [name for name in checkpoint.names() if not name.startswith(_LAYERS)]
        if hparams.tie_embeddings:
            names = [name for name in names if name != "lm_head.weight"]
        read = {name: checkpoint.read(name, checkpoint.stored(name).shape) for name in names}
        found = {name: before_reading(name, each, self._rules) for name, each in read.items()}
        dtype = self._recipe.dtype
        return self._named({name: cast_checked(each, dtype, name) for name, each in found.items()})

    def _named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names.of(name): tensor for name, tensor in tensors.items()}


def packed_for(recipe: Recipe, weight: QuantisedWeight) -> dict[str, Tensor]:
    """Pack a weight in the recipe's format."""
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
    *,
    layers: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
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
            "windlass": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def mean_errors(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Average the relative squared errors of weights and outputs over all linear layers."""
    found: dict[str, list[float]] = {}
    for layer in layers:
        for quality in layer["linears"].values():
            for name in ("weight_error", "output_error"):
                if name in quality:
                    found.setdefault(name, []).append(quality[name])
    return {name: sum(values) / len(values) for name, values in found.items()}


def _error_text(report: Mapping[str, Any]) -> str:
    means = mean_errors([dict(report)])
    name = "output_error" if "output_error" in means else "weight_error"
    return f"{name.replace('_', ' ')} {means[name]:.2e}"
