"""Lists the weight formats that `bench formats` compares, and builds their checkpoints.

A checkpoint's folder name contains a hash of all its inputs, so a resumed or later run reuses it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from windlass.build import OpenModel
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.folders import write_atomically
from windlass.models.card import open_checkpoint
from windlass.tools.quantize.calibration import SampleOptions
from windlass.tools.quantize.export import export
from windlass.tools.quantize.program import QuantizeJob, run
from windlass.tools.quantize.recipe import CALIBRATED, QuantizeOptions

Log = Callable[[str], None]

REFERENCE = "float32"
_PLAIN_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `options` override the run's; the other fields describe its checkpoint."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    quantize: QuantizeOptions | None = None
    calibration: Literal["text", "random"] = "text"
    plain: torch.dtype | None = None  # unquantised dtype of all weights
    gguf: str | None = None  # GGUF type of the matrices; names the file

    @property
    def online(self) -> bool:
        return "quantization" in self.options

    @property
    def needs_text(self) -> bool:
        calibrated = self.quantize is not None and self.quantize.method in CALIBRATED
        return calibrated and self.calibration == "text"


def _online(name: str, head: bool = False) -> Format:
    options: dict[str, Any] = {"quantization": name}
    return (
        Format(f"{name}+head", {**options, "quantize_head": True})
        if head
        else Format(name, options)
    )


def _gguf(kind: str) -> Format:
    return Format(f"gguf-{kind.lower()}", gguf=kind)


def _cache(dtype: str) -> Format:
    return Format(f"kv-{dtype}", {"kv_cache_dtype": dtype})


FORMATS: tuple[Format, ...] = (
    Format(REFERENCE, {"dtype": "float32"}),
    Format("float16", plain=torch.float16),
    Format("bfloat16", plain=torch.bfloat16),
    Format("stored"),
    _online("int8"),
    _online("int8", head=True),
    _online("w8a8"),
    _online("fp8"),
    _online("fp8-block"),
    _online("int4"),
    _online("int4", head=True),
    _online("w4a8"),
    _online("nf4"),
    Format("rtn-8", quantize=QuantizeOptions(method="rtn", bits=8, group_size=32)),
    Format("smoothquant", quantize=QuantizeOptions(method="smoothquant")),
    Format("rtn-4", quantize=QuantizeOptions(method="rtn", bits=4)),
    Format("gptq-4", quantize=QuantizeOptions(method="gptq", bits=4)),
    Format("awq-4", quantize=QuantizeOptions(method="awq", bits=4)),
    Format("gptq-4-random", quantize=QuantizeOptions(method="gptq", bits=4), calibration="random"),
    Format("rtn-3", quantize=QuantizeOptions(method="rtn", bits=3)),
    Format("gptq-3", quantize=QuantizeOptions(method="gptq", bits=3)),
    *map(_gguf, ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K")),
    _cache("int8"),
    _cache("fp8"),
)


@dataclass(frozen=True, slots=True)
class FormatInputs:
    """Files that some formats need."""

    calibration: Path | None = None
    gguf_dir: Path | None = None  # the model as GGUF files, named by type

    def missing_for(self, format_: Format) -> str | None:
        """The flag that is missing for a format."""
        if format_.needs_text and self.calibration is None:
            return "--calibration FILE.jsonl, with lines such as " + '{"text": "..."}'
        if format_.gguf is not None and self.gguf_dir is None:
            return "--gguf-dir DIR, a folder with the model as Q8_0.gguf, Q4_K.gguf, ..."
        return None


def find_formats(names: Sequence[str], inputs: FormatInputs, log: Log) -> list[Format]:
    """The formats of these names; without names, all formats whose inputs are given."""
    known = {each.name: each for each in FORMATS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--formats: {unknown[0]!r} is not known. Known: {', '.join(known)}.")
    chosen = [known[name] for name in known if not names or name in names]
    missing: dict[str, list[str]] = {}
    for each in chosen:
        if (flag := inputs.missing_for(each)) is not None:
            missing.setdefault(flag, []).append(each.name)
    for flag, without in missing.items():
        if names:
            raise ConfigError(f"--formats {', '.join(without)}: needs {flag}.")
        log(f"skipped without {flag.split()[0]}: {', '.join(without)}")
    return [each for each in chosen if inputs.missing_for(each) is None]


@dataclass(frozen=True, slots=True)
class CheckpointBuilder:
    """Builds the checkpoints of one model."""

    base: EngineConfig
    opened: OpenModel
    folder: Path
    inputs: FormatInputs
    num_samples: int
    sample_tokens: int
    log: Log

    def model_of(self, format_: Format) -> str:
        """The model to load for a format; builds its checkpoint if it does not exist."""
        if format_.quantize is not None:
            return str(self._quantised(format_, format_.quantize))
        if format_.gguf is not None:
            return str(self._gguf(format_.gguf))
        if format_.plain is not None:
            return str(self._plain(format_.plain))
        if format_.online and self._is_quantised():
            return str(self._plain(torch.float32))
        return self.base.model.model

    def _is_quantised(self) -> bool:
        """Whether the model's matrices are quantised, which --quantization does not accept."""
        if self.opened.hparams.quantization:
            raise ConfigError(
                f"{self.opened.card.name} is a quantised checkpoint and does not contain the "
                "original weights. Give the original model, or a GGUF file."
            )
        checkpoint = open_checkpoint(self.opened.files, self.base.model)
        stored = [checkpoint.stored(name) for name in checkpoint.names()]
        return any(len(it.shape) == 2 and it.format not in _PLAIN_TYPES for it in stored)

    def _plain(self, dtype: torch.dtype) -> Path:
        name = str(dtype).removeprefix("torch.")
        folder = self.folder / f"{name}-{self._key()}"
        if not folder.is_dir():
            self.log(f"writing the weights in {name} to {folder}")
            export(self.base.model, folder, dtype)
        return folder

    def _gguf(self, kind: str) -> Path:
        assert self.inputs.gguf_dir is not None, "find_formats skips these formats without it"
        path = self.inputs.gguf_dir / f"{kind}.gguf"
        if not path.is_file():
            raise ConfigError(
                f"--gguf-dir: {path} does not exist. Write it with llama-quantize, or with "
                "benchmarks/scripts/requantize_gguf.py."
            )
        return path

    def _quantised(self, format_: Format, options: QuantizeOptions) -> Path:
        text = self._text(format_) if options.method in CALIBRATED else None
        digest = hashlib.sha256(text.read_bytes()).hexdigest() if text else None
        samples = SampleOptions(
            num_samples=self.num_samples,
            sample_tokens=self.sample_tokens,
            skip_bad_lines=False,
            seed=self.base.model.seed,
        )
        key = self._key(asdict(options), digest, asdict(samples))
        folder = self.folder / f"{format_.name}-{key}"
        if not folder.is_dir():
            self.log(f"quantising into {folder}")
            job = QuantizeJob(
                model=self.base.model,
                options=options,
                output=folder,
                calibration=text,
                samples=samples,
            )
            run(job, self.log, self._progress)
        return folder

    def _progress(self, done: int, total: int, text: str) -> None:
        if done and (done == total or done % max(1, total // 5) == 0):
            self.log(f"{done} of {total} layers, {text}")

    def _text(self, format_: Format) -> Path | None:
        return self._random_text() if format_.calibration == "random" else self.inputs.calibration

    def _random_text(self) -> Path:
        """Write a calibration set of uniformly random tokens."""
        count, length = self.num_samples, self.sample_tokens
        path = self.folder / f"random-{self._key(count, length)}.jsonl"
        if not path.is_file():
            tokenizer = self.opened.card.tokenizer
            draw = random.Random(self.base.model.seed)
            ids = range(tokenizer.vocab_size)
            texts = [tokenizer.decode(draw.choices(ids, k=length)) for _ in range(count)]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    def _key(self, *more: object) -> str:
        """Hash of the model's files and `more`."""
        files = self.opened.files
        weights = [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files.weights
        ]
        return hashlib.sha256(repr([weights, *more]).encode()).hexdigest()[:10]
