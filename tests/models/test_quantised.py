"""Quantised weights in networks: online quantisation, mixed GGUFs, dummy weights, inspect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.models import tiny
from tests.models.tiny import Type, write_gguf
from tests.quant.folders import IDS, loaded, logits, write_plain
from windlass import LLM, SamplingParams
from windlass.cli.main import app
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.layers.embedding import TiedEmbedding
from windlass.layers.linear import Linear
from windlass.models.checkpoint import SafetensorsCheckpoint
from windlass.models.families.registry import read_hparams
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.loader import outline
from windlass.models.network import make_network
from windlass.quant.rounding import SCHEMES
from windlass.runner.load import make_blueprint

# Maximum relative error of the logits against unquantised weights: two layers of random weights,
# the worst case for quantisation.
FAR = {
    "int8": 0.03,
    "w8a8": 0.05,
    "fp8": 0.16,
    "fp8-block": 0.16,
    "int4": 0.4,
    "w4a8": 0.4,
    "nf4": 0.36,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("head", [False, True])
def test_online_quantisation_stays_close(name: str, head: bool, plain: Path, tied: Path) -> None:
    for folder in (plain, tied):
        want = logits(loaded(folder))
        quantisation: dict[str, Any] = {"quantization": name, "quantize_head": head}
        oracle = logits(loaded(folder, **quantisation, plain_kernels=True))
        assert 1e-4 < (oracle - want).norm() / want.norm() < FAR[name]
        # Unpacked weights differ from the reference only in the order of sums; a kernel of this
        # machine may also quantise activations to int8, and those of w4a8 more finely.
        for options, near in (({"dtype": "float32"}, 1e-3), ({}, 0.1 if name == "w4a8" else 0.05)):
            got = logits(loaded(folder, **quantisation, **options))
            assert (got - oracle).norm() < near * want.norm()


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_weights_are_smaller(name: str, plain: Path) -> None:
    whole = loaded(plain).weight_bytes
    packed = loaded(plain, quantization=name, plain_kernels=True)
    bits = {"int4": 5.3, "nf4": 4.6, "int8": 9.1}.get(name, 8.6)
    layers = [m for m in packed.network.modules() if isinstance(m, Linear) and m.gemms]
    weights = sum(p.shape[0] * p.shape[1] for layer in layers for p in layer.gemms)
    assert sum(layer.gemm_bytes for layer in layers) <= bits / 8 * weights
    assert packed.weight_bytes < whole
    assert not any(layer.stored for layer in layers)


def test_tied_head_is_shared_unless_quantised(tied: Path) -> None:
    shared = loaded(tied, quantization="int8", plain_kernels=True).network
    assert shared.lm_head.weight is shared.model.embed_tokens.weight
    packed = loaded(tied, quantization="int8").network
    assert isinstance(packed.model.embed_tokens, TiedEmbedding)
    own = loaded(tied, quantization="int8", quantize_head=True).network
    assert own.lm_head.weight is None
    assert len(own.lm_head.gemms) == 1


@pytest.mark.parametrize("options", [{}, {"plain_kernels": True}], ids=["default", "plain"])
def test_engines_generate_with_quantised_weights(plain: Path, options: dict[str, Any]) -> None:
    for name in SCHEMES:
        llm = LLM(str(plain), load_format="dummy", quantization=name, num_blocks=64, **options)
        out = llm.generate([IDS], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert len(out[0].outputs[0].token_ids) == 4
        lines = {choice.what: choice for choice in llm.report.choices}
        assert lines["weights"].value == name
        assert f"{name} weights" in lines


MIXED = {
    "attn_q.weight": Type.Q4_0,
    "attn_k.weight": Type.Q8_0,
    "attn_v.weight": Type.F16,
    "ffn_down.weight": Type.Q5_1,
    "ffn_gate.weight": Type.Q5_0,
    "token_embd.weight": Type.Q8_0,
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, kind=Type.Q4_1, kinds=MIXED)


def test_a_gguf_of_many_types_is_kept_packed(mixed: Path) -> None:
    reference = loaded(mixed, dtype="float32")
    packed = loaded(mixed, plain_kernels=True)
    torch.testing.assert_close(logits(packed), logits(reference), atol=1e-4, rtol=1e-4)
    block = packed.network.model.layers[0]
    forms = [gemm.form for gemm in block.self_attn.qkv_proj.gemms]
    assert forms == ["int4, groups of 32", "int8, groups of 32", "float32"]
    assert block.self_attn.qkv_proj.method.name == "Q4_0 + Q8_0 + not quantised"
    assert len(block.mlp.gate_up_proj.gemms) == 2
    assert len(block.mlp.down_proj.gemms) == 1
    assert packed.weight_bytes < 0.5 * reference.weight_bytes
    # The head is packed, so the embedding table has its own storage.
    assert packed.network.lm_head.weight is None
    assert packed.network.model.embed_tokens.weight.shape == (tiny.VOCAB, tiny.HIDDEN)


def test_reference_equals_dequantised_weights(mixed: Path) -> None:
    network = loaded(mixed, dtype="float32").network
    assert not any(m.gemms for m in network.modules() if isinstance(m, Linear))
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_quantised_gguf_is_not_quantised_again(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4: the file is quantised already"):
        loaded(mixed, quantization="int4")
    half = write_gguf(tmp_path / "h.gguf", kind=Type.F16)
    assert loaded(half, quantization="int4", plain_kernels=True).network.lm_head.weight is not None


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4, groups of 64"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8 per row"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8, blocks of 128 x 128, activations per block",
        ),
        ({"quant_method": "fp8"}, "fp8 per channel, activations per token"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "4-bit table, groups of 64",
        ),
    ],
)
def test_dummy_weights_use_the_configs_format(
    quantization: dict[str, Any], form: str, plain: Path
) -> None:
    made = loaded(
        plain,
        load_format="dummy",
        hf_overrides={"quantization_config": quantization},
        plain_kernels=True,
    )
    assert made.network.model.layers[1].mlp.down_proj.gemms[0].form == form
    assert torch.isfinite(logits(made)).all()


def inspect(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_inspect_reports_weight_formats(plain: Path) -> None:
    options = ["--load-format", "dummy", "-q", "int4", "--plain-kernels"]
    found = inspect(str(plain), *options)
    layers = {item["layer"]: item for item in found["linear_layers"]}
    down = layers["model.layers.*.mlp.down_proj"]
    assert (down["method"], down["form"]) == ("int4", "int4, groups of 128")
    assert (down["kernel"], down["layers"], down["bits_per_weight"]) == ("plain", 2, 4.25)
    assert down["refusals"] == {"all others": "plain kernels were requested"}
    assert layers["lm_head"]["form"] == "float32"
    made = loaded(plain, load_format="dummy", quantization="int4", plain_kernels=True)
    assert found["estimate"]["weight_bytes"] == made.weight_bytes
    wide = {"COLUMNS": "300"}
    shown = CliRunner().invoke(app, ["inspect", str(plain), *options], env=wide).output
    assert "4.25 bits per weight, plain: all others: plain kernels were requested" in shown


@pytest.mark.parametrize("options", [{"plain_kernels": True}, {"dtype": "float32"}, {}], ids=str)
def test_outline_has_the_loaded_sizes(mixed: Path, options: dict[str, Any]) -> None:
    checkpoint = GGUFCheckpoint(mixed)
    spec = read_hparams(checkpoint.hf_config())
    config = EngineConfig.of(model=str(mixed), **options)
    network = make_network(spec, make_blueprint(config, spec, checkpoint).parts)
    outline(network)
    # A kernel's layout may add padding.
    real = loaded(mixed, **options).weight_bytes
    assert network.weight_bytes == pytest.approx(real, rel=0 if options else 0.1)


def test_quantize_head_needs_quantization() -> None:
    with pytest.raises(ConfigError, match="--quantize-head does nothing without --quantization"):
        LLM("default", quantize_head=True)


def test_a_layer_is_finished_before_the_next_is_read(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SafetensorsCheckpoint.read
    layers: list[Linear] = []
    most_waiting = 0

    def counted(self: SafetensorsCheckpoint, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal most_waiting
        most_waiting = max(most_waiting, sum(bool(layer.stored) for layer in layers))
        return read(self, *args, **kwargs)

    init = Linear.__init__

    def remembered(self: Linear, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        layers.append(self)

    monkeypatch.setattr(Linear, "__init__", remembered)
    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    loaded(plain, quantization="int8")
    assert len(layers) == 9
    assert most_waiting == 1
