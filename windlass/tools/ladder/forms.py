"""Where the weights of each rung come from: the model itself, rounded while loading, or a checkpoint.

The base must have 16 bits. A GGUF file with less is written out once in 16 bits, and its own form is
the rung that it is nearest to.
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
from windlass.tools.bench.format_list import FORMATS, Format, Means, Workshop
from windlass.tools.ladder.rungs import PLAIN

Log = Callable[[str], None]

_SAMPLES, _SAMPLE_TOKENS = {"cpu": 32, "cuda": 128}, 256  # a CPU takes minutes for so few
_PLAIN_TYPES = ("f32", "f16", "bf16")
_EIGHT_BITS = ("q8", "q6", "q5")  # GGUF's types that are nearer to 8 bits than to 4
_MADE = {"gptq": "gptq-4", "awq": "awq-4"}
_ROUNDED = ("int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class Given:
    """What the user gave for rungs that cannot be made out of nothing."""

    named: tuple[str, ...] = ()  # rungs asked for by name
    checkpoints: Mapping[str, str] | None = None  # gptq, awq -> a model
    full: bool = False  # make those that are missing
    calibration: Path | None = None


class Forms:
    """The options that give each form of one model."""

    def __init__(self, options: Mapping[str, Any], given: Given, log: Log) -> None:
        self.options: Mapping[str, Any] = dict(options)
        self._given = given
        self.config = EngineConfig.of(**options)
        self.device = choose_device(self.config.model)
        self.source = open_model(self.config)
        self.stored = _stored_type(self.source, self.config)
        self._workshop = Workshop(
            self.config,
            self.source,
            cache_folder("formats"),
            Means(given.calibration),
            _SAMPLES[self.device.type],
            _SAMPLE_TOKENS,
            log,
        )
        if self.source.hparams.quantization:
            raise ConfigError(
                f"{self.source.card.name} cannot be loaded in 16 bit: its weights are quantised, and "
                "the original ones are not in it. Give the original model, and this one with "
                "--awq or --gptq."
            )

    @cached_property
    def _plain(self) -> str:
        """A model with weights of 16 bits, or of more where its own have more."""
        if self.stored is None:
            return self.config.model.model
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        return self._workshop.model_of(Format("16 bit", plain=dtype))

    @property
    def own_form(self) -> str | None:
        """The rung that the file's own weights stand for; None: they have 16 bits or more."""
        if self.stored is None:
            return None
        return "int8" if self.stored.startswith(_EIGHT_BITS) else "int4"

    def options_of(self, form: str) -> dict[str, Any]:
        """Laid over the options of a rung; raises why there is no such form."""
        if form == PLAIN:
            return {"model": self._plain}
        if form == self.own_form:
            return {}
        if form in _ROUNDED:
            if form == "fp8" and self.device.type == "cpu" and form not in self._given.named:
                raise UnsupportedError(
                    "a CPU has no fp8 arithmetic; --rungs fp8 measures it through torch"
                )
            # Products of 16 bits are slow on a CPU, and a small model's head is much of it.
            head = {"quantize_head": True} if self.device.type == "cpu" else {}
            return {"model": self._plain, "quantization": form, **head}
        return {"model": self._checkpoint(form)}

    def _checkpoint(self, form: str) -> str:
        given = (self._given.checkpoints or {}).get(form)
        if given is not None:
            return given
        if not self._given.full:
            raise UnsupportedError(
                f"--{form} MODEL gives a checkpoint; --full --calibration FILE makes one"
            )
        wanted = next(each for each in FORMATS if each.name == _MADE[form])
        lacks = self._workshop.means.lacks(wanted)
        if lacks is not None:
            raise UnsupportedError(f"needs {lacks}")
        return self._workshop.model_of(wanted)

    def about(self, form: str) -> str:
        """What the form is, in words."""
        bits = {"int8": "8", "fp8": "8", "int4": "4", "gptq": "4", "awq": "4"}.get(form)
        if form == PLAIN:
            if self.stored is None:
                return "the weights as the model has them"
            name = "bfloat16" if self.device.type == "cuda" else "float16"
            return f"the file's {self.stored} weights, written out in {name}"
        if form == self.own_form:
            return f"the file's own {self.stored} weights"
        if form in _ROUNDED:
            head = ", the head too" if self.device.type == "cpu" else ""
            return f"rounded to {bits} bits while they are loaded{head}"
        return f"a {form.upper()} checkpoint of {bits} bits"


def _stored_type(opened: OpenModel, config: EngineConfig) -> str | None:
    """The type of most bytes of a GGUF's matrices; None: 16 bits or more, or no such file."""
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
