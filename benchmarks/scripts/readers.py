"""Compares the logits of other readers with ours, on checkpoints of `windlass quantize`.

    python benchmarks/scripts/readers.py FOLDER... --python THEIRS/bin/python -o benchmarks/readers.json

THEIRS is an environment with transformers and the packages of the formats: gptqmodel for GPTQ and
AWQ, bitsandbytes for NF4, compressed-tensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import foreign_logits
import torch
from safetensors.torch import load_file
from torch import Tensor

from windlass.build import OpenModel, open_model
from windlass.build_scorer import build_scorer
from windlass.config import EngineConfig
from windlass.errors import EngineError
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoringLimits, Window
from windlass.tools.common.record import Record
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.metrics import Tally, compare
from windlass.tools.eval.windows import Cut, cut_corpus

_NOTES = (
    "The same files, read by transformers with the format's package and by Windlass, both in float32 "
    "on a CPU. RMS difference: root mean square of the difference of the logits, divided by their "
    "standard deviation. served: our packed kernels, which quantise activations; the others do not."
)


def main() -> None:
    """Compare all folders and save after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--data", default="wikitext2")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--windows", type=int, default=4)
    args = parser.parse_args()
    cut = Cut("strided", args.context, args.context, args.windows)
    settings = {"data": args.data, "context": args.context, "windows": args.windows}
    rows: list[dict[str, Any]] = []
    for folder in args.folders:
        rows.append(compare_readers(folder, args.python, args.data, cut))
        print(rows[-1], file=sys.stderr)
        Record("readers", rows, _NOTES, settings).save(args.output)


def compare_readers(folder: Path, python: Path, data: str, cut: Cut) -> dict[str, Any]:
    """One row: the checkpoint, its reader, and the difference of the logits."""
    exact, served = (
        EngineConfig.of(model=str(folder), device="cpu", dtype=dtype)
        for dtype in ("float32", "auto")
    )
    opened = open_model(exact)
    windows = [item.window for item in cut_corpus(read_corpus(data), opened.card, cut)]
    theirs, reader = _theirs(folder, python, windows)
    row = {
        "checkpoint": folder.name,
        "format": _format(folder),
        "reader": _packages(reader["versions"], _format(folder)),
        "layer": reader["layer"],
        "tokens": len(theirs),
    }
    return (
        row
        | _difference(_ours(exact, opened, windows), theirs, windows, "")
        | _difference(_ours(served, opened, windows), theirs, windows, "served_")
    )


def _theirs(folder: Path, python: Path, windows: Sequence[Window]) -> tuple[Tensor, dict[str, Any]]:
    with TemporaryDirectory() as room:
        ids, output = Path(room) / "ids.json", Path(room) / "logits.safetensors"
        ids.write_text(json.dumps([list(window.tokens) for window in windows]))
        program = [str(python), str(foreign_logits.__file__), str(folder), str(ids), str(output)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode or not output.is_file():
            printed = done.stderr.strip() or done.stdout.strip() or "no output"
            raise EngineError(f"{folder}: {python} cannot read it: {printed.splitlines()[-1]}")
        logits = load_file(output)["logits"]
    reader: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return logits, reader


def _ours(config: EngineConfig, opened: OpenModel, windows: Sequence[Window]) -> Tensor:
    steps = config.limits(choose_device(config.model).type)
    max_len = max(len(window.tokens) for window in windows)
    limits = ScoringLimits(max_len, steps.max_num_batched_tokens, steps.max_num_seqs)
    whole = [Window(window.tokens) for window in windows]
    chunks = build_scorer(config, opened.source, limits).scorer.logits(whole)
    return torch.cat([chunk.values.float() for chunk in chunks])


def _difference(
    ours: Tensor, theirs: Tensor, windows: Sequence[Window], prefix: str
) -> dict[str, float]:
    difference = (ours - theirs).double()
    tally = Tally()
    targets = [token for window in windows for token in [*window.tokens[1:], window.tokens[0]]]
    tally.add(compare(ours, targets, theirs))
    against = tally.quality().against
    assert against is not None
    figures = {
        "rms": float(difference.square().mean().sqrt() / theirs.double().std()),
        "max": float(difference.abs().max()),
        "kl_mean": against.kl_mean,
        "agreement": against.agreement,
    }
    return {prefix + name: float(f"{value:.4g}") for name, value in figures.items()}


def _format(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("quantization_config", {}).get("quant_method", "none"))


def _packages(versions: dict[str, str], method: str) -> str:
    package = {"gptq": "gptqmodel", "awq": "gptqmodel"}.get(method, method)
    used = ["transformers", package] if package in versions else ["transformers"]
    return " + ".join(f"{name} {versions[name]}" for name in used)


if __name__ == "__main__":
    main()
