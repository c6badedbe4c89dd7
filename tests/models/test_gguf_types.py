"""Every storage type of GGUF in products and in whole models: the same results as dequantised
weights, in no more memory than the packed form takes.
"""

from __future__ import annotations

import subprocess
import sys
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
from windlass.kernels.native.compiler import find_compilers
from windlass.kernels.reference_linear import form_bytes
from windlass.layers.linear import Linear
from windlass.quant.gguf import KINDS
from windlass.quant.gguf_blocks import pack

CPU = torch.device("cpu")
# Of the norm of a product whose inputs are rounded to int8, and of logits behind two layers of them.
ROUNDED, ROUNDED_LOGITS = 0.012, 0.05
_COMPILERS, _ = find_compilers()

pytestmark = pytest.mark.skipif(not _COMPILERS, reason="no C++ compiler")


@pytest.mark.parametrize("name", KINDS)
def test_a_gemm_matches_the_dequantised_weight(name: str) -> None:
    blocks = weights_of(name, 40, 512)
    weight = torch.from_numpy(dequantize(blocks, Type[name]))
    product = Linears(CPU, torch.float32).prepare(pack(torch.from_numpy(blocks), KINDS[name]))
    assert product.kernel == "native"
    for rows in (1, 3, 17):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        want = x @ weight.T
        assert (product.prepared.apply(x) - want).norm() <= ROUNDED * want.norm()


def packed_bytes(name: str, tensors: Mapping[str, np.ndarray]) -> int:
    """What the forms of the matrices and the plain vectors take."""
    return sum(
        form_bytes(pack(torch.from_numpy(values), KINDS[name]))
        if values.dtype == np.uint8
        else values.nbytes
        for values in tensors.values()
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", KINDS)
def test_a_model_stays_packed(name: str, tied: bool, tmp_path: Path) -> None:
    """Its embedding and its head, too."""
    tensors = tiny.block_tensors(name, tied)
    path = tiny.write_gguf(tmp_path / "m.gguf", kind=Type[name], tensors=tensors)
    made = loaded(path)
    layers = [module for module in made.network.modules() if isinstance(module, Linear)]
    assert {gemm.kernel for layer in layers for gemm in layer.gemms} == {"native"}
    assert made.weight_bytes <= 1.3 * packed_bytes(name, tensors)
    want = logits(loaded(path, dtype="float32"))
    assert (logits(made) - want).norm() <= ROUNDED_LOGITS * want.norm()


# Loads a tiny model, for what is made only once, then another; says how far memory rose meanwhile.
_PEAK = """
import sys
from pathlib import Path
from tests.quant.folders import loaded

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

small, large = (Path(path) for path in sys.argv[1:])
loaded(small)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
made = loaded(large)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_never_holds_a_dequantised_matrix(tmp_path: Path) -> None:
    name, vocab = "IQ2_XXS", 128 * 1024
    tensors = tiny.block_tensors(name)
    paths = [tiny.write_gguf(tmp_path / "s.gguf", kind=Type[name], tensors=tensors)]
    for matrix in ("token_embd.weight", "output.weight"):
        tensors[matrix] = weights_of(name, vocab, tiny.HIDDEN)
    paths.append(tiny.write_gguf(tmp_path / "l.gguf", kind=Type[name], tensors=tensors))
    command = [sys.executable, "-c", _PEAK, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The model, one matrix in its form, the file's pages, and blocks that are taken apart.
    assert int(done.stdout) < 3 * packed_bytes(name, tensors) < 4 * vocab * tiny.HIDDEN


@pytest.mark.parametrize("name", ["IQ2_XXS", "TQ1_0", "MXFP4"])
def test_an_engine_generates(name: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(
        tmp_path / "m.gguf",
        kind=Type[name],
        tensors=tiny.block_tensors(name),
        metadata=tiny.TOKENIZER,
    )
    llm = LLM(str(path), num_blocks=16)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (out,) = llm.generate([IDS], params)
    assert len(out.outputs[0].token_ids) == 4
    lines = {choice.what: choice.value for choice in llm.report.choices}
    assert "native kernel" in lines[f"{name} weights"]
