"""Writes a GGUF model with its matrices in other types, with llama.cpp's quantisers.

    python benchmarks/scripts/requantize_gguf.py MODEL.gguf LIBRARY.so -o DIR

`windlass bench formats --gguf-dir DIR` measures the files DIR/Q4_K.gguf and so on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gguf_perplexity import TYPES
from llama_library import Kind, LlamaCpp, requantize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("llama_cpp", type=Path, help="llama.cpp shared library")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    args = parser.parse_args()
    library = LlamaCpp(args.llama_cpp)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.types:
        path = args.output / f"{name}.gguf"
        part = path.with_suffix(".unfinished")
        requantize(args.model, part, getattr(Kind, name), library)
        os.replace(part, path)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
