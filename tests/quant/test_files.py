"""Every checkpoint format: a tiny folder gives the logits of its dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.quant import packers
from tests.quant.folders import loaded, logits, rewrite, write_plain
from tests.quant.packers import Packed

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": "group",
            },
        }
    },
}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "awq": (lambda _, w: packers.awq(w, 32), AWQ),
    "awq rows": (lambda _, w: packers.awq(w, w.shape[1]), AWQ | {"group_size": -1}),
    "gptq": (lambda _, w: packers.gptq(w, 4, 32), GPTQ),
    "gptq v2": (
        lambda _, w: packers.gptq(w, 4, 32, v2=True),
        GPTQ | {"checkpoint_format": "gptq_v2"},
    ),
    "gptq 8": (lambda _, w: packers.gptq(w, 8, 64), GPTQ | {"bits": 8, "group_size": 64}),
    "gptq 3": (lambda _, w: packers.gptq(w, 3, 32), GPTQ | {"bits": 3}),
    "gptq 2": (lambda _, w: packers.gptq(w, 2, 32), GPTQ | {"bits": 2}),
    "gptq act-order": (
        lambda _, w: packers.gptq(w, 4, 32, act_order=3),
        GPTQ | {"desc_act": True},
    ),
    # q, k and v with different act-orders: three GEMMs in one layer.
    "gptq act-order per part": (
        lambda n, w: packers.gptq(w, 4, 32, act_order=len(n) + ord(n[-6])),
        GPTQ | {"desc_act": True},
    ),
    "nf4": (lambda _, w: packers.nf4(w, False), NF4),
    "nf4 nested": (lambda _, w: packers.nf4(w, True), NF4 | {"bnb_4bit_use_double_quant": True}),
    "bnb int8": (
        lambda _, w: packers.bnb_int8(w),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "int4 act-order": (lambda _, w: packers.int4_with_order(w, 32, 5), INT4),
    "skipped part": (
        lambda n, w: None if n.endswith(("k_proj", "0.mlp.up_proj")) else packers.awq(w, 32),
        AWQ | {"modules_to_not_convert": ["k_proj", "model.layers.0.mlp.up_proj"]},
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize("name", CASES)
def test_format_gives_the_logits_of_its_dequantised_weights(
    name: str, plain: Path, tmp_path: Path
) -> None:
    pack, quantization = CASES[name]
    folder, reference = rewrite(plain, tmp_path / "q", pack, quantization)
    want = logits(loaded(reference))
    assert want.std() > 0.3, "the logits are too small for the comparison to mean anything"
    packed, unpacked = loaded(folder, plain_kernels=True), loaded(folder, dtype="float32")
    for made in (packed, unpacked):
        torch.testing.assert_close(logits(made), want, atol=2e-3, rtol=1e-3)
    assert packed.weight_bytes < 0.6 * unpacked.weight_bytes
    # A kernel of this machine may quantise activations to int8.
    assert (logits(loaded(folder)) - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize(("block", "static"), [(None, False), (None, True), (128, False)])
def test_fp8_quantises_activations(
    block: int | None, static: bool, plain: Path, tmp_path: Path
) -> None:
    given = 0.02 if static else None
    quantization = FP8 | ({"weight_block_size": [128, 128]} if block else {})
    quantization |= {"activation_scheme": "static" if static else "dynamic"}

    def pack(name: str, weight: Tensor) -> Packed:
        del name
        return packers.fp8(weight, block, given)

    folder, reference = rewrite(plain, tmp_path / "q", pack, quantization)
    want = logits(loaded(reference))
    unpacked, packed = loaded(folder, dtype="float32"), loaded(folder, plain_kernels=True)
    got, oracle = logits(unpacked), logits(packed)
    # Both quantise activations in the same way; only the order of sums differs.
    torch.testing.assert_close(got, oracle, atol=2e-2, rtol=1e-2)
    error = (got - want).norm() / want.norm()
    assert 1e-3 < error < 0.12
