"""The weight formats that are compared, and making the checkpoints that some of them are.

Checkpoints lie in a work folder under a name that holds all they depend on, so that a run which
goes on, or a second one, finds what is made already.
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
    """One row. `options` are laid over the run's; the others say how a checkpoint of it is made."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    wishes: QuantizeOptions | None = None
    calibration: Literal["text", "random"] = "text"
    plain: torch.dtype | None = None  # the type that all weights are written in
    gguf: str | None = None  # the type of the matrices: the name of a file

    @property
    def online(self) -> bool:
        return "quantization" in self.options

    @property
    def needs_text(self) -> bool:
        calibrated = self.wishes is not None and self.wishes.method in CALIBRATED
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
    Format("rtn-8", wishes=QuantizeOptions(method="rtn", bits=8, group_size=32)),
    Format("smoothquant", wishes=QuantizeOptions(method="smoothquant")),
    Format("rtn-4", wishes=QuantizeOptions(method="rtn", bits=4)),
    Format("gptq-4", wishes=QuantizeOptions(method="gptq", bits=4)),
    Format("awq-4", wishes=QuantizeOptions(method="awq", bits=4)),
    Format("gptq-4-random", wishes=QuantizeOptions(method="gptq", bits=4), calibration="random"),
    Format("rtn-3", wishes=QuantizeOptions(method="rtn", bits=3)),
    Format("gptq-3", wishes=QuantizeOptions(method="gptq", bits=3)),
    *map(_gguf, ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K")),
    _cache("int8"),
    _cache("fp8"),
)


@dataclass(frozen=True, slots=True)
class Means:
    """What some rows are made with."""

    calibration: Path | None = None
    gguf_dir: Path | None = None  # the model as GGUF files, named by type

    def lacks(self, wanted: Format) -> str | None:
        """The flag that is missing for a row."""
        if wanted.needs_text and self.calibration is None:
            return "--calibration FILE.jsonl, with lines such as " + '{"text": "..."}'
        if wanted.gguf is not None and self.gguf_dir is None:
            return "--gguf-dir DIR, a folder with the model as Q8_0.gguf, Q4_K.gguf, ..."
        return None


def find_formats(names: Sequence[str], means: Means, log: Log) -> list[Format]:
    """Those of the names, or all that can be made."""
    known = {each.name: each for each in FORMATS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--formats: {unknown[0]!r} is not known. Known: {', '.join(known)}.")
    chosen = [known[name] for name in known if not names or name in names]
    lacking: dict[str, list[str]] = {}
    for each in chosen:
        if (flag := means.lacks(each)) is not None:
            lacking.setdefault(flag, []).append(each.name)
    for flag, without in lacking.items():
        if names:
            raise ConfigError(f"--formats {', '.join(without)}: needs {flag}.")
        log(f"left out for lack of {flag.split()[0]}: {', '.join(without)}")
    return [each for each in chosen if means.lacks(each) is None]


@dataclass(frozen=True, slots=True)
class Workshop:
    """Makes the checkpoints of one model."""

    base: EngineConfig
    opened: OpenModel
    folder: Path
    means: Means
    num_samples: int
    sample_tokens: int
    log: Log

    def model_of(self, wanted: Format) -> str:
        """The model to load for a format, made when it is not there yet."""
        if wanted.wishes is not None:
            return str(self._made(wanted, wanted.wishes))
        if wanted.gguf is not None:
            return str(self._gguf(wanted.gguf))
        if wanted.plain is not None:
            return str(self._plain(wanted.plain))
        if wanted.online and self._is_quantised():
            return str(self._plain(torch.float32))
        return self.base.model.model

    def _is_quantised(self) -> bool:
        """Whether the model's matrices are something that --quantization does not take."""
        if self.opened.hparams.quantization:
            raise ConfigError(
                f"{self.opened.card.name}: its weights are quantised by its config.json, and the "
                "original ones are not in it. Give the original model, or a GGUF file."
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
        assert self.means.gguf_dir is not None, "find_formats leaves these rows out without it"
        path = self.means.gguf_dir / f"{kind}.gguf"
        if not path.is_file():
            raise ConfigError(
                f"--gguf-dir: there is no {path}. Write it with llama-quantize, or with "
                "benchmarks/scripts/requantize_gguf.py."
            )
        return path

    def _made(self, wanted: Format, wishes: QuantizeOptions) -> Path:
        text = self._text(wanted) if wishes.method in CALIBRATED else None
        digest = hashlib.sha256(text.read_bytes()).hexdigest() if text else None
        choice = SampleOptions(self.num_samples, self.sample_tokens, False, self.base.model.seed)
        folder = self.folder / f"{wanted.name}-{self._key(asdict(wishes), digest, asdict(choice))}"
        if not folder.is_dir():
            self.log(f"quantising into {folder}")
            order = QuantizeJob(self.base.model, wishes, folder, text, choice)
            run(order, self.log, self._progress)
        return folder

    def _progress(self, done: int, total: int, text: str) -> None:
        if done and (done == total or done % max(1, total // 5) == 0):
            self.log(f"{done} of {total} layers, {text}")

    def _text(self, wanted: Format) -> Path | None:
        return self._random_text() if wanted.calibration == "random" else self.means.calibration

    def _random_text(self) -> Path:
        """As many texts as are calibrated on, each of so many tokens drawn evenly."""
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
        """Differs with the model's files and whatever else is given."""
        files = self.opened.files
        weights = [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files.weights
        ]
        return hashlib.sha256(repr([weights, *more]).encode()).hexdigest()[:10]
