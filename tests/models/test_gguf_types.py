"""Every storage type of GGUF in products and in whole models: the same results as dequantised
weights, in no more memory than the packed form takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from tests.models import tiny
from tests.quant.blocks import weights_of
from tests.quant.folders import IDS, loaded, logits
from windlass import LLM, SamplingParams
from windlass.kernels.linears import Linears
from windlass.kernels.native import compiled
from windlass.kernels.plain_linear import form_bytes
from windlass.layers.linear import Linear
from windlass.quant.gguf import KINDS
from windlass.quant.gguf_blocks import pack

CPU = torch.device("cpu")
# Of the norm of a product whose inputs are rounded to int8, and of logits behind two layers of them.
ROUNDED, ROUNDED_LOGITS = 0.012, 0.05
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["AB", *(chr(33 + i) for i in range(1, tiny.VOCAB))],
    "tokenizer.ggml.token_type": [1] * tiny.VOCAB,
    "tokenizer.ggml.merges": ["A B"],
    "tokenizer.ggml.eos_token_id": 0,
}
_COMPILERS, _ = compiled.find_compilers()

pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")


@pytest.mark.parametrize("name", KINDS)
def test_a_product_is_that_of_the_dequantised_weight(name: str) -> None:
    blocks = weights_of(name, 40, 512)
    weight = torch.from_numpy(dequantize(blocks, Type[name]))
    product = Linears(CPU, torch.float32).hold(pack(torch.from_numpy(blocks), KINDS[name]))
    assert product.kernel == "native"
    for rows in (1, 3, 17):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        want = x @ weight.T
        assert (product.prepared.apply(x) - want).norm() <= ROUNDED * want.norm()


def block_tensors(name: str) -> dict[str, np.ndarray]:
    """A tiny model whose matrices are all of one type."""
    return {
        tensor: weights_of(name, *values.shape, seed=seed) if values.ndim == 2 else values
        for seed, (tensor, values) in enumerate(tiny.gguf_tensors("llama").items())
    }


def packed_bytes(name: str, tensors: Mapping[str, np.ndarray]) -> int:
    """What the forms of the matrices and the plain vectors take."""
    return sum(
        form_bytes(pack(torch.from_numpy(values), KINDS[name]))
        if values.dtype == np.uint8
        else values.nbytes
        for values in tensors.values()
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_model_stays_packed(name: str, tmp_path: Path) -> None:
    tensors = block_tensors(name)
    path = tiny.write_gguf(tmp_path / "m.gguf", kind=Type[name], tensors=tensors)
    made = loaded(path)
    layers = [module for module in made.network.modules() if isinstance(module, Linear)]
    assert {product.kernel for layer in layers for product in layer.products} == {"native"}
    assert made.weight_bytes <= 1.3 * packed_bytes(name, tensors)
    want = logits(loaded(path, dtype="float32"))
    assert (logits(made) - want).norm() <= ROUNDED_LOGITS * want.norm()


@pytest.mark.parametrize("name", ["IQ2_XXS", "TQ1_0", "MXFP4"])
def test_an_engine_generates(name: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "m.gguf", kind=Type[name], tensors=block_tensors(name), metadata=TOKENIZER
    )
    llm = LLM(str(path), num_blocks=16)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (out,) = llm.generate([IDS], params)
    assert len(out.outputs[0].token_ids) == 4
    lines = {choice.what: choice.value for choice in llm.report.choices}
    assert "native kernel" in lines[f"{name} weights"]
