"""Finds the weights of each rung: the model's own, quantised while loading, or a checkpoint.

The base needs 16-bit weights. A GGUF file with fewer bits is exported once in 16 bits, and the file
itself serves the rung with the nearest number of bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from windlass.build import OpenModel, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError, UnsupportedError
from windlass.folders import cache_folder
from windlass.models.card import open_checkpoint
from windlass.runner.device import choose_device
from windlass.tools.bench.checkpoints import FORMATS, CheckpointBuilder, Format, FormatInputs
from windlass.tools.ladder.rungs import BASE_WEIGHTS

Log = Callable[[str], None]

_SAMPLES, _SAMPLE_TOKENS = {"cpu": 32, "cuda": 128}, 256  # 32 samples take minutes on a CPU
_PLAIN_TYPES = ("f32", "f16", "bf16")
_EIGHT_BITS = ("q8", "q6", "q5")  # GGUF types that are nearer to 8 bits than to 4
_CHECKPOINT_FORMATS = {"gptq": "gptq-4", "awq": "awq-4"}
_ONLINE = ("int8", "fp8", "int4")  # quantised while loading


@dataclass(frozen=True, slots=True)
class WeightInputs:
    """User inputs for rungs whose weights need more than the model."""

    named: tuple[str, ...] = ()  # rungs that the user listed
    checkpoints: Mapping[str, str] | None = None  # gptq, awq -> a model
    full: bool = False  # build missing checkpoints
    calibration: Path | None = None


class LadderWeights:
    """The engine options that load each kind of weights of one model."""

    def __init__(self, options: Mapping[str, Any], inputs: WeightInputs, log: Log) -> None:
        self.options: Mapping[str, Any] = dict(options)
        self._inputs = inputs
        self.config = EngineConfig.of(**options)
        self.device = choose_device(self.config.model)
        self.source = open_model(self.config)
        self.stored = _stored_type(self.source, self.config)
        self._checkpoints = CheckpointBuilder(
            base=self.config,
            opened=self.source,
            folder=cache_folder("formats"),
            inputs=FormatInputs(inputs.calibration),
            num_samples=_SAMPLES[self.device.type],
            sample_tokens=_SAMPLE_TOKENS,
            log=log,
        )
        if self.source.hparams.quantization:
            raise ConfigError(
                f"{self.source.card.name} cannot be loaded in 16 bit: it is quantised and does not "
                "contain the original weights. Give the original model, and this one with "
                "--awq or --gptq."
            )

    @cached_property
    def _base(self) -> str:
        """A model with 16-bit weights, or with more bits if its own have more."""
        if self.stored is None:
            return self.config.model.model
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        return self._checkpoints.model_of(Format("16 bit", plain=dtype))

    @property
    def own_rung(self) -> str | None:
        """The rung that the file's own weights serve; None: they have 16 bits or more."""
        if self.stored is None:
            return None
        return "int8" if self.stored.startswith(_EIGHT_BITS) else "int4"

    def options_of(self, weights: str) -> dict[str, Any]:
        """Engine options that load these weights; raises if they are not available."""
        if weights == BASE_WEIGHTS:
            return {"model": self._base}
        if weights == self.own_rung:
            return {}
        if weights in _ONLINE:
            if weights == "fp8" and self.device.type == "cpu" and "fp8" not in self._inputs.named:
                raise UnsupportedError(
                    "a CPU has no fp8 arithmetic; --rungs fp8 measures it through torch"
                )
            # 16-bit GEMMs are slow on a CPU, and the head is a large part of a small model.
            head = {"quantize_head": True} if self.device.type == "cpu" else {}
            return {"model": self._base, "quantization": weights, **head}
        return {"model": self._checkpoint(weights)}

    def _checkpoint(self, weights: str) -> str:
        given = (self._inputs.checkpoints or {}).get(weights)
        if given is not None:
            return given
        if not self._inputs.full:
            raise UnsupportedError(
                f"set a checkpoint with --{weights} MODEL, or build one with --full "
                "--calibration FILE"
            )
        format_ = next(each for each in FORMATS if each.name == _CHECKPOINT_FORMATS[weights])
        missing = self._checkpoints.inputs.missing_for(format_)
        if missing is not None:
            raise UnsupportedError(f"needs {missing}")
        return self._checkpoints.model_of(format_)

    def about(self, weights: str) -> str:
        if weights == BASE_WEIGHTS:
            if self.stored is None:
                return "the model's own weights"
            name = "bfloat16" if self.device.type == "cuda" else "float16"
            return f"the file's {self.stored} weights, exported as {name}"
        if weights == self.own_rung:
            return f"the file's own {self.stored} weights"
        bits = 8 if weights in ("int8", "fp8") else 4
        if weights in _ONLINE:
            head = ", including the head" if self.device.type == "cpu" else ""
            return f"quantised to {bits} bits while loading{head}"
        return f"a {weights.upper()} checkpoint of {bits} bits"


def _stored_type(opened: OpenModel, config: EngineConfig) -> str | None:
    """The type of most of a GGUF file's weights; None: 16 bits or more, or another file type."""
    if opened.files.kind != "gguf" or config.model.load_format == "dummy":
        return None
    checkpoint = open_checkpoint(opened.files, config.model)
    sizes: Counter[str] = Counter()
    for name in checkpoint.names():
        stored = checkpoint.stored(name)
        if len(stored.shape) == 2:
            sizes[stored.format.lower()] += prod(stored.shape)
    (name, _), *_ = sizes.most_common(1)
    return None if name in _PLAIN_TYPES else name
