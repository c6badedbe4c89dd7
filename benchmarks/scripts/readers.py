"""Compares the logits of other programs with ours, on checkpoints that `windlass quantize` wrote.

    python benchmarks/scripts/readers.py FOLDER... --python THEIRS/bin/python -o benchmarks/readers.json

THEIRS is an environment with transformers and what reads the folders' formats: gptqmodel for GPTQ
and AWQ, bitsandbytes for NF4, compressed-tensors.
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

from windlass.build import OpenModel, build_scorer, open_model
from windlass.config import EngineConfig
from windlass.errors import EngineError
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoringLimits, Window
from windlass.tools.common.record import Record
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.metrics import Tally, compare
from windlass.tools.eval.windows import Cut, cut_corpus

_NOTES = (
    "The same files, read by transformers with the package that knows the format, and by us; both in "
    "float32 on a CPU. rms: the root mean square of the logits' difference over their standard "
    "deviation. As served: our packed kernels, which round inputs; theirs do not."
)


def main() -> None:
    """Compare all folders; every finished row is saved."""
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
    """One row: what the folder is, who read it, and how far the logits lie apart."""
    exact, served = (
        EngineConfig.of(model=str(folder), device="cpu", dtype=dtype)
        for dtype in ("float32", "auto")
    )
    opened = open_model(exact)
    windows = [item.window for item in cut_corpus(read_corpus(data), opened.card, cut)]
    theirs, about = _theirs(folder, python, windows)
    row = {
        "checkpoint": folder.name,
        "format": _format(folder),
        "reader": _in_words(about["versions"], _format(folder)),
        "layer": about["layer"],
        "tokens": len(theirs),
    }
    return (
        row
        | _apart(_ours(exact, opened, windows), theirs, windows, "")
        | _apart(_ours(served, opened, windows), theirs, windows, "served_")
    )


def _theirs(folder: Path, python: Path, windows: Sequence[Window]) -> tuple[Tensor, dict[str, Any]]:
    with TemporaryDirectory() as room:
        ids, output = Path(room) / "ids.json", Path(room) / "logits.safetensors"
        ids.write_text(json.dumps([list(window.tokens) for window in windows]))
        program = [str(python), str(foreign_logits.__file__), str(folder), str(ids), str(output)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        if done.returncode or not output.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            raise EngineError(f"{folder}: {python} does not read it: {said}")
        logits = load_file(output)["logits"]
    about: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return logits, about


def _ours(config: EngineConfig, opened: OpenModel, windows: Sequence[Window]) -> Tensor:
    steps = config.limits(choose_device(config.model).type)
    longest = max(len(window.tokens) for window in windows)
    limits = ScoringLimits(longest, steps.max_num_batched_tokens, steps.max_num_seqs)
    whole = [Window(window.tokens) for window in windows]
    pieces = build_scorer(config, opened.source, limits).scorer.logits(whole)
    return torch.cat([piece.values.float() for piece in pieces])


def _apart(
    ours: Tensor, theirs: Tensor, windows: Sequence[Window], prefix: str
) -> dict[str, float]:
    apart = (ours - theirs).double()
    tally = Tally()
    targets = [token for window in windows for token in [*window.tokens[1:], window.tokens[0]]]
    tally.add(compare(ours, targets, theirs))
    against = tally.quality().against
    assert against is not None
    figures = {
        "rms": float(apart.square().mean().sqrt() / theirs.double().std()),
        "max": float(apart.abs().max()),
        "kl_mean": against.kl_mean,
        "agreement": against.agreement,
    }
    return {prefix + name: float(f"{value:.4g}") for name, value in figures.items()}


def _format(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(config.get("quantization_config", {}).get("quant_method", "none"))


def _in_words(versions: dict[str, str], method: str) -> str:
    package = {"gptq": "gptqmodel", "awq": "gptqmodel"}.get(method, method)
    used = ["transformers", package] if package in versions else ["transformers"]
    return " + ".join(f"{name} {versions[name]}" for name in used)


if __name__ == "__main__":
    main()
