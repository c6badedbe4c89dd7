"""16-bit checkpoints on a CPU: weights keep their dtype; native kernels accumulate in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quant.folders import IDS, loaded, logits, write_plain
from windlass import LLM, SamplingParams
from windlass.kernels.native.compiler import find_compilers
from windlass.layers.embedding import Embedding, TiedEmbedding
from windlass.layers.linear import Linear

# Relative to the logits' norm: the same float32 GEMMs with another order of sums.
SUMS = 1e-5

pytestmark = pytest.mark.skipif(not find_compilers()[0], reason="no C++ compiler")


def converted(folder: Path, dtype: torch.dtype) -> Path:
    """Convert a checkpoint's weights to a dtype."""
    made = folder.with_name(f"{folder.name}-{str(dtype)[6:]}")
    shutil.copytree(folder, made)
    file = made / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text()) | {"dtype": str(dtype)[6:]}
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_keep_the_file_dtype(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    folder = converted(write_plain(tmp_path / "model", tied=tied), dtype)
    kept, reference = loaded(folder), loaded(folder, dtype="float32")
    layers = [one for one in kept.network.modules() if isinstance(one, Linear)]
    assert {gemm.kernel for one in layers for gemm in one.gemms} == {"native"}
    assert all(one.weight is None for one in layers)
    # The head is padded to tiles of 8 outputs; norms are float32.
    share = kept.weight_bytes / reference.weight_bytes
    assert share == pytest.approx(dtype.itemsize / 4, rel=0.01)
    table = kept.network.get_submodule("model.embed_tokens")
    assert isinstance(table, TiedEmbedding if tied else Embedding)
    want = logits(reference)
    assert (logits(kept) - want).norm() <= SUMS * want.norm()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=str)
def test_steps_are_captured(tmp_path: Path, options: dict[str, str]) -> None:
    folder = converted(write_plain(tmp_path / "model"), torch.bfloat16)
    llm = LLM(str(folder), device="cpu", num_blocks=16, load_format="dummy", **options)
    lines = {choice.what: choice.value for choice in llm.report.choices}
    assert lines["steps"].startswith("one native call")
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert len(llm.generate([list(IDS)], sampling)[0].outputs[0].token_ids) == 4
