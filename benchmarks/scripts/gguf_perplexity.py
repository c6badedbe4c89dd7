"""Compares our perplexity of GGUF files with llama.cpp's, on the same files and text.

    python benchmarks/scripts/gguf_perplexity.py MODEL.gguf LIBRARY.so -o benchmarks/gguf-perplexity.json

The files are requantised from the model's with llama.cpp's quantisers, except for the type "stored",
which is the file as it is. LIBRARY is a llama.cpp shared library. Types that are already in the output
file are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from llama_library import Kind, LlamaCpp, requantize

from windlass.config import EngineConfig
from windlass.tools.common.record import Record, saved_rows
from windlass.tools.eval.data import Corpus, read_corpus
from windlass.tools.eval.run import measure
from windlass.tools.eval.windows import Cut

TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K")
_STORED = "stored"
_NOTES = (
    "Perplexities by llama.cpp's definition. All matrices of a file have one type, except the "
    "embedding and rows that blocks of 256 do not divide, which have llama.cpp's fallback types. "
    "float32: our reference implementation, which dequantises the weights. served: our packed "
    "kernels, which quantise activations as llama.cpp's do."
)


def main() -> None:
    """Measure all types and save after each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--data", default="wikitext2")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--types", nargs="+", choices=(*TYPES, _STORED), default=TYPES)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    library, corpus = LlamaCpp(args.llama_cpp), read_corpus(args.data)
    settings = {name: str(getattr(args, name)) for name in ("data", "context", "windows")}
    settings["model"] = args.model.name
    rows = saved_rows(args.output, "gguf-perplexity", settings)
    with TemporaryDirectory() as folder:
        for name in args.types:
            if name in [row["type"] for row in rows]:
                continue
            file, types = args.model, _STORED
            if name != _STORED:
                file = Path(folder) / f"{name}.gguf"
                types = _counts(requantize(args.model, file, getattr(Kind, name), library))
            rows.append({"type": name, "types": types, "file_bytes": file.stat().st_size})
            rows[-1] |= _figures(library, file, corpus, args)
            print(rows[-1], file=sys.stderr)
            if name != _STORED:
                file.unlink()
            rows.sort(key=lambda row: (*TYPES, _STORED).index(row["type"]))
            Record("gguf-perplexity", rows, _NOTES, settings).save(args.output)


def _figures(
    library: LlamaCpp, file: Path, corpus: Corpus, args: argparse.Namespace
) -> dict[str, float]:
    text = corpus.documents[0].text
    assert text is not None, "a running text is one document with text"
    theirs = library.perplexity(
        file, text, context=args.context, windows=args.windows, threads=args.threads
    )
    cut = Cut("llama.cpp", args.context, None, args.windows)
    ours = {
        name: measure(EngineConfig.of(model=str(file), dtype=dtype), None, corpus, cut).overall
        for name, dtype in (("float32", "float32"), ("served", "auto"))
    }
    figures = {"llama_cpp": round(theirs, 4)}
    for name, quality in ours.items():
        figures[name] = round(quality.perplexity, 4)
        figures[f"{name}_pct"] = round(100 * (quality.perplexity / theirs - 1), 3)
    return figures


def _counts(used: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in used.items())


if __name__ == "__main__":
    main()
