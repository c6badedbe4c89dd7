"""Computes the logits of a checkpoint with transformers and the package of its format.

readers.py runs this file in an environment with those packages, so it imports nothing of Windlass.
Arguments: a checkpoint folder, a JSON file with lists of token ids, and a .safetensors file for the
"logits", float32 [tokens, vocabulary]. The last printed line is JSON: the class of a quantised layer,
and package versions.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("transformers", "torch", "gptqmodel", "bitsandbytes", "compressed-tensors")


def main(folder: str, ids_file: str, output: str) -> None:
    """Compute in float32, as far as the reader supports it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from safetensors.torch import save_file

    reader = import_module("transformers").AutoModelForCausalLM
    model = reader.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
        if "compute_dtype" in vars(module):  # bitsandbytes
            vars(module)["compute_dtype"] = torch.float32
    with open(ids_file, encoding="utf-8") as file:
        windows = json.load(file)
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0].float() for ids in windows]
    save_file({"logits": torch.cat(logits).contiguous()}, output)
    layer = type(model.get_submodule("model.layers.0.mlp.down_proj"))
    print(json.dumps({"layer": f"{layer.__module__}.{layer.__name__}", "versions": _versions()}))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    del sys.path[0]  # files in this folder must not shadow installed packages
    main(*sys.argv[1:])
