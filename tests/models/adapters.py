"""Adapters in PEFT's format, against transformers with the adapter merged into its weights."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from tests.lora.folders import write_adapter
from tests.runner.test_windows import make, transformers_tokens
from tests.steps import generate
from windlass import SamplingParams

RANK, SCALING, COUNT = 2, 4.0, 8
PROMPT = [3 + 5 * i % 89 for i in range(21)]


def check_adapters(
    model: nn.Module, folder: Path, targets: list[str], prefix: tuple[str, str] = ("", "")
) -> None:
    """An adapter of all layers whose names end so, under the names that they have in transformers.

    `prefix`: of these names, and what an adapter has instead.
    """
    base = transformers_tokens(model, PROMPT, COUNT)
    random, tensors = torch.Generator().manual_seed(1), {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] not in targets:
            continue
        num_out, num_in = module.weight.shape
        down = torch.randn(RANK, num_in, generator=random) * 0.2
        up = torch.randn(num_out, RANK, generator=random) * 0.2
        key = "base_model.model." + re.sub(f"^{re.escape(prefix[0])}", prefix[1], name)
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        with torch.no_grad():
            module.weight += SCALING * up @ down  # alpha 8, rank 2
    assert {name.split(".")[-3] for name in tensors} == set(targets)
    adapter = write_adapter(folder / "adapter", rank=RANK, targets=targets, tensors=tensors)
    options = {"enable_lora": True, "max_lora_rank": RANK, "lora_modules": [f"a={adapter}"]}
    built = make(folder, dtype="float32", num_blocks=100, **options)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    want = transformers_tokens(model, PROMPT, COUNT)
    assert want != base
    for name, tokens in (("a", want), ("", base)):
        assert generate(built.engine, [PROMPT], params, name) == [tokens], name
