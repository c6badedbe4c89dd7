"""Prints the dependencies of pyproject.toml without torch, for `make test-oldest`.

uv resolves the lowest versions of these. torch's metadata would add gigabytes of CUDA libraries.
"""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

if __name__ == "__main__":
    required = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    print(*(item for item in required if not item.startswith("torch")), sep="\n")
