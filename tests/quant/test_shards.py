"""Shards joined are the whole, for every format: as stored tensors, as weights, and as outputs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models import tiny
from tests.models.comparison import make_parts
from tests.models.tiny import write_gguf
from tests.quant import packers, test_compressed_tensors, test_files
from tests.quant.blocks import weights_of
from tests.quant.folders import loaded, logits, rewrite, write_plain
from tests.quant.ranks import (
    CPU,
    FakeGroup,
    Make,
    Ranks,
    in_threads,
    joined_outputs,
    thread_groups,
)
from windlass.config import EngineConfig
from windlass.errors import CheckpointError, ShardError
from windlass.kernels import reference
from windlass.kernels.linears import Linears
from windlass.kernels.ops import Ops
from windlass.layers.linear import Linear
from windlass.layers.mlp import GatedMLP
from windlass.lora.bank import Bank
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from windlass.models.dummy import DummyCheckpoint
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.loader import load
from windlass.models.network import Weights, make_network
from windlass.models.source import resolve
from windlass.parallel.mesh import Group, Mesh
from windlass.quant.base import Axis, LinearMethod
from windlass.quant.gguf import KINDS, Gguf
from windlass.quant.rounding import SCHEMES
from windlass.quant.shard import Shard
from windlass.quant.unquantised import Unquantised
from windlass.runner.load import make_blueprint
from windlass.speculative.heads import _RenamedCheckpoint

# Heads of 128, so that every format can be cut in four. Two kv heads: four ranks share them.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OPS = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
)
COUNTS = (2, 4)
ACT_ORDER = ("gptq act-order", "gptq act-order per part", "int4 act-order")
Write = Callable[[Path, Path], Path]


def _packed(pack: Any, quantization: dict[str, Any]) -> Write:
    return lambda plain, folder: rewrite(plain, folder, pack, quantization)[0]


def _fp8(block: int | None, input_scale: float | None, **changes: Any) -> Write:
    return _packed(
        lambda _, weight: packers.fp8(weight, block, input_scale), test_files.FP8 | changes
    )


def _compressed(kind: str, weights: Any, inputs: Any = None) -> Write:
    return lambda plain, folder: test_compressed_tensors.compress(
        plain, folder, kind, weights, inputs
    )


FORMATS: dict[str, Write] = {
    "plain": lambda plain, _: plain,
    **{name: _packed(*case) for name, case in test_files.CASES.items() if name not in ACT_ORDER},
    "gptq rows": _packed(
        lambda _, w: packers.gptq(w, 4, w.shape[1]), test_files.GPTQ | {"group_size": -1}
    ),
    "fp8": _fp8(None, None),
    "fp8 static": _fp8(None, 0.02, activation_scheme="static"),
    "fp8 blocks": _fp8(128, None, weight_block_size=[128, 128]),
    **{
        f"compressed-tensors {name}": _compressed(*case[:3])
        for name, case in test_compressed_tensors.CASES.items()
    },
    **{
        f"compressed-tensors {name}": _compressed(*case)
        for name, case in test_compressed_tensors.BY_BYTE.items()
    },
}
# A dynamic activation scale per token is that of a rank's inputs, so row-parallel sums differ.
DYNAMIC = ("fp8", "compressed-tensors w8a8", "compressed-tensors w8a8 asymmetric")
DYNAMIC += ("compressed-tensors fp8 token", "w8a8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("plain") / "model", **SIZES)


def network_of(folder: Path, **options: Any) -> tuple[Make, Checkpoint]:
    config = EngineConfig.of(model=str(folder), **options)
    files = resolve(config.model)
    hparams = load_hparams(files, config.model)
    checkpoint = open_checkpoint(files, config.model)
    parts = make_blueprint(config, hparams, checkpoint).parts
    return lambda group: make_network(hparams, replace(parts, mesh=Mesh(group))), checkpoint


def assert_joined(ranks: Ranks, *, exact: bool = True, dynamic: bool = False) -> None:
    """Inputs of one read the weights; random inputs mix them."""
    ranks.assert_reads_join()
    with torch.inference_mode():
        for path, whole, shards in ranks.linears():
            num_in = whole.inputs.whole
            want, got = whole(torch.eye(num_in)), joined_outputs(shards, torch.eye(num_in))
            if exact:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=path)
            x = torch.randn(5, num_in, generator=torch.Generator().manual_seed(1))
            want, got = whole(x), joined_outputs(shards, x)
            assert want.std() > 0.01
            far = 0.05 if dynamic or not exact else 1e-5
            assert (got - want).norm() <= far * want.norm(), path


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("name", FORMATS)
def test_shards_joined_are_the_whole(name: str, size: int, plain: Path, tmp_path: Path) -> None:
    folder = FORMATS[name](plain, tmp_path / "q")
    for options in ({"dtype": "float32"}, {"plain_kernels": True}):
        ranks = Ranks.of(*network_of(folder, **options), size)
        assert_joined(ranks, dynamic=name in DYNAMIC)
        assert_only_shards_are_read(ranks, size)


def assert_only_shards_are_read(ranks: Ranks, size: int) -> None:
    """The largest tensor of each projection is cut; kv heads are shared by four ranks."""
    largest: dict[str, int] = {}
    for name, (_, _, whole) in ranks.whole_reads.reads.items():
        module = re.match(r".*_proj", name)
        if module:
            largest[module[0]] = max(largest.get(module[0], 0), whole.nbytes)
    for spy in ranks.shard_reads:
        for module, num_bytes in largest.items():
            count = min(size, 2) if module.endswith(("k_proj", "v_proj")) else size
            own = [read[2].nbytes for name, read in spy.reads.items() if name.startswith(module)]
            assert max(own) == num_bytes // count, module


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("name", SCHEMES)
def test_online_quantisation_of_shards_gives_the_same_codes(
    name: str, size: int, plain: Path
) -> None:
    ranks = Ranks.of(*network_of(plain, quantization=name, plain_kernels=True), size)
    # Scales of whole rows are those of a rank's inputs.
    exact = name not in ("fp8", "w8a8")
    assert_joined(ranks, exact=exact, dynamic=name in ("fp8", "w8a8", "w4a8"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_keep_their_dtype(
    dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    folder, file = tmp_path / "model", "model.safetensors"
    shutil.copytree(plain, folder)
    save_file({k: v.to(dtype) for k, v in load_file(plain / file).items()}, folder / file)
    ranks = Ranks.of(*network_of(folder), 4)
    assert {read[2].dtype for spy in ranks.shard_reads for read in spy.reads.values()} == {dtype}
    assert_joined(ranks)


class Mlp(Weights):
    """An MLP alone."""

    def __init__(self, method: LinearMethod, group: Group) -> None:
        super().__init__()
        self.mlp = GatedMLP(tiny.HIDDEN, tiny.FFN, lambda _: method, OPS, group)


def gguf_mlp(path: Path, kind: str) -> Checkpoint:
    """The MLP of a GGUF's first block, under shorter names."""
    shapes = {"gate": (tiny.FFN, tiny.HIDDEN), "up": (tiny.FFN, tiny.HIDDEN)}
    shapes["down"] = (tiny.HIDDEN, tiny.FFN)
    random = np.random.default_rng(4)
    tensors = {
        f"blk.0.ffn_{name}.weight": random.normal(0, 0.1, shape).astype(np.float32)
        if kind in ("F32", "F16", "BF16")
        else weights_of(kind, *shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    file = write_gguf(path / "m.gguf", kind=tiny.Type[kind], tensors=tensors)
    return _RenamedCheckpoint(GGUFCheckpoint(file), {"model.layers.0.": ""}, ())


@pytest.mark.parametrize("kind", [*KINDS, "F32", "F16", "BF16"])
def test_gguf_shards_joined_are_the_whole(kind: str, tmp_path: Path) -> None:
    checkpoint = gguf_mlp(tmp_path, kind)
    methods: list[LinearMethod] = [Unquantised(torch.float32, name=kind)]
    if kind in KINDS:
        methods.append(Gguf(kind, Linears(CPU, torch.float32, plain=True)))
    for method in methods:
        is_packed = isinstance(method, Gguf)
        for size in (2, 4) if not is_packed or KINDS[kind].values <= 128 else (2,):
            assert_joined(Ranks.of(lambda group, m=method: Mlp(m, group), checkpoint, size))


def test_a_gguf_block_cannot_be_cut(tmp_path: Path) -> None:
    method = Gguf("Q4_K", Linears(CPU, torch.float32))
    message = (
        r"mlp\.down_proj: Q4_K weights cannot be cut into 4 shards along their 512 inputs: the unit is "
        r"256 inputs\. Numbers of shards that work: 1, 2\."
    )
    with pytest.raises(ShardError, match=message):
        load(Mlp(method, FakeGroup(0, 4)), gguf_mlp(tmp_path, "Q4_K"), CPU)


@pytest.mark.parametrize("size", COUNTS)
def test_dummy_weights_are_the_same_for_any_number_of_ranks(size: int, plain: Path) -> None:
    make, _ = network_of(plain)
    ranks = Ranks.of(make, DummyCheckpoint(7), size)
    ranks.assert_reads_join()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_dummy_regions_join(size: int) -> None:
    shape = (37, 300)
    whole = DummyCheckpoint(1).read("x.weight", shape)
    rows = [slice(37 * i // size, 37 * (i + 1) // size) for i in range(size)]
    columns = [slice(300 * i // size, 300 * (i + 1) // size) for i in range(size)]
    for row in rows:
        for column in columns:
            part = DummyCheckpoint(1).read("x.weight", shape, (row, column))
            assert torch.equal(part, whole[row, column])


# The whole network ------------------------------------------------------------------------------


def rank_logits(folder: Path, size: int, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits of one rank alone, and of each of `size` ranks that exchange partial results."""
    options |= {"dtype": "float32", "plain_kernels": True}
    whole = loaded(folder, **options)
    make, checkpoint = network_of(folder, **options)
    shards = []
    for group in thread_groups(size):
        network = make(group)
        load(network, checkpoint, CPU)
        parts = replace(whole.parts, mesh=Mesh(tp=group))
        shards.append(replace(whole, network=network, parts=parts))
    calls = [lambda shard=shard: logits(shard) for shard in shards]
    return logits(whole), in_threads(calls)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
def test_ranks_compute_the_logits_of_one_rank(
    changes: dict[str, Any], size: int, tmp_path: Path
) -> None:
    folder = write_plain(tmp_path / "model", **(SIZES | changes))
    want, found = rank_logits(folder, size)
    assert want.std() > 0.3
    assert len(found) == size
    for got in found:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_share_a_packed_vocabulary(tied: bool, tmp_path: Path) -> None:
    tensors = tiny.block_tensors("Q8_0", tied=tied)
    file = write_gguf(tmp_path / "m.gguf", kind=tiny.Type.Q8_0, tensors=tensors)
    ranks = Ranks.of(*network_of(file), 4)
    ids = torch.arange(tiny.VOCAB)
    with torch.inference_mode():
        rows = [network.embed(ids) for network in ranks.shards]
        assert torch.equal(torch.stack(rows).sum(0), ranks.whole.embed(ids))
        for own, network in zip(rows, ranks.shards, strict=True):
            (shard,) = network.lm_head.outputs.values()
            held = (own != 0).any(-1).nonzero().flatten()
            assert held.tolist() == list(range(shard.start, shard.stop))


def test_neighbouring_ranks_share_a_kv_head(plain: Path) -> None:
    make, checkpoint = network_of(plain, dtype="float32")
    ranks = Ranks.of(make, checkpoint, 4)
    name = "model.layers.0.self_attn.{}.weight"
    for part, heads in (
        ("q_proj", [0, 1, 2, 3]),
        ("k_proj", [0, 0, 1, 1]),
        ("v_proj", [0, 0, 1, 1]),
    ):
        whole = ranks.whole_reads.reads[name.format(part)][2]
        for spy, head in zip(ranks.shard_reads, heads, strict=True):
            _, region, found = spy.reads[name.format(part)]
            assert region[0] == slice(128 * head, 128 * (head + 1))
            assert torch.equal(found, whole[128 * head : 128 * (head + 1)])
    for shard in ranks.shards:
        heads = shard.get_submodule("model.layers.0.self_attn").heads
        assert (heads.num_q, heads.num_kv, heads.dim) == (1, 1, 128)


def test_a_tied_head_shares_the_shard_of_the_table(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "model", tied=True, **SIZES)
    make, checkpoint = network_of(folder, dtype="float32")
    for rank in range(4):
        network = make(FakeGroup(rank, 4))
        load(network, checkpoint, CPU)
        head, table = network.lm_head, network.model.embed_tokens
        assert head.weight is table.weight
        assert len(table.weight) == [16, 32, 32, 17][rank]
        assert network.table is None


# What cannot be cut -----------------------------------------------------------------------------


def shard_error(folder: Path, size: int, **options: Any) -> str:
    make, checkpoint = network_of(folder, **options)
    with pytest.raises(ShardError) as error:
        load(make(FakeGroup(size - 1, size)), checkpoint, CPU)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("plain", 3, "self_attn.q_proj: float32 weights cannot be cut into 3 shards along their 512 outputs: the unit is 128 outputs. Numbers of shards that work: 1, 2, 4."),
        ("plain", 8, "self_attn.q_proj: float32 weights cannot be cut into 8 shards"),
        ("gptq", 16, "self_attn.q_proj: gptq 4-bit weights cannot be cut into 16 shards"),
    ],
)  # fmt: skip
def test_heads_are_not_cut(name: str, size: int, words: str, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "plain", **SIZES, vocab_size=512)
    folder = FORMATS[name](source, tmp_path / "q")
    assert words in shard_error(folder, size)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "awq",
            {"intermediate_size": 320},
            "down_proj: awq weights cannot be cut into 8 shards along their 320 inputs: the unit is 32 "
            "inputs. Numbers of shards that work: 1, 2, 5, 10.",
        ),
        (
            "gptq 8",
            {"intermediate_size": 576},
            "down_proj: gptq 8-bit weights cannot be cut into 8 shards along their 576 inputs: the "
            "unit is 64 inputs. Numbers of shards that work: 1, 3, 9.",
        ),
        (
            "fp8 blocks",
            {},
            "gate_proj: fp8 blocks weights cannot be cut into 8 shards along their 512 outputs: the "
            "unit is 128 outputs. Numbers of shards that work: 1, 2, 4.",
        ),
        (
            "nf4",
            {"intermediate_size": 320},
            "down_proj: bitsandbytes nf4 weights cannot be cut into 8 shards along their 320 inputs: "
            "the unit is 64 inputs. Numbers of shards that work: 1, 5.",
        ),
        (
            "compressed-tensors int4 groups",
            {"intermediate_size": 320},
            "down_proj: compressed-tensors int4 weights cannot be cut into 8 shards along their 320 "
            "inputs: the unit is 32 inputs. Numbers of shards that work: 1, 2, 5, 10.",
        ),
    ],
)
def test_stored_units_are_not_cut(
    name: str, changes: dict[str, int], words: str, tmp_path: Path
) -> None:
    sizes = SIZES | {"num_attention_heads": 8, "head_dim": 64, "vocab_size": 512} | changes
    if name == "fp8 blocks":
        sizes |= {"head_dim": 128}
    source = write_plain(tmp_path / "plain", **sizes)
    folder = FORMATS[name](source, tmp_path / "q")
    assert words in shard_error(folder, 8)


@pytest.mark.parametrize("name", ACT_ORDER)
def test_act_order_is_cut_along_the_outputs_only(name: str, plain: Path, tmp_path: Path) -> None:
    folder = _packed(*test_files.CASES[name])(plain, tmp_path / "q")
    want, found = rank_logits(folder, 2)
    for got in found:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    make, _ = network_of(folder)
    o_proj = make(FakeGroup(1, 2)).get_submodule("model.layers.0.self_attn.o_proj")
    assert o_proj.inputs.is_whole
    assert o_proj.outputs["o_proj"].count == o_proj.outputs["o_proj"].whole // 2


def test_an_act_order_that_the_config_does_not_state_is_refused(
    plain: Path, tmp_path: Path
) -> None:
    pack, quantization = test_files.CASES["gptq act-order"]
    folder = _packed(pack, quantization | {"desc_act": False})(plain, tmp_path / "q")
    error = shard_error(folder, 2)
    assert re.search(
        r"o_proj: [\w\- ]+ weights cannot be cut into 2 shards along their 512 inputs: \w+ \(act-order\) spreads groups of "
        r"32 inputs over several shards, so the unit is all 512 inputs\. Numbers of shards that work: 1\.",
        error,
    )


def test_an_online_group_is_not_cut(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "model", **(SIZES | {"intermediate_size": 384}))
    error = shard_error(folder, 4, quantization="int4")
    assert "down_proj: int4 weights cannot be cut into 4 shards along their 384 inputs" in error
    assert "the unit is 128 inputs. Numbers of shards that work: 1, 3." in error


def test_a_small_vocabulary_names_the_counts(tmp_path: Path) -> None:
    sizes = SIZES | {"num_attention_heads": 8, "vocab_size": 97}
    folder = write_plain(tmp_path / "model", **sizes)
    error = shard_error(folder, 8)
    assert (
        "model.embed_tokens.weight: unquantised weights cannot be cut into 8 shards along their 97 "
        "outputs"
    ) in error
    assert "the unit is 16 outputs. Numbers of shards that work: 1, 2, 3, 4, 5, 6, 7." in error


def test_nothing_is_read_before_the_error(plain: Path) -> None:
    class Unreadable(SafetensorsCheckpoint):
        def read(self, *_: Any, **__: Any) -> Tensor:
            raise AssertionError("read before the check")

    make, _ = network_of(plain)
    with pytest.raises(ShardError):
        load(make(FakeGroup(0, 3)), Unreadable([plain / "model.safetensors"]), CPU)


# Shards and axes --------------------------------------------------------------------------------


def spans(whole: int, size: int, **options: Any) -> list[tuple[int, int]]:
    shards = [Shard(whole, rank, size, **options) for rank in range(size)]
    return [(shard.start, shard.stop) for shard in shards]


def test_spans_of_ranks() -> None:
    assert spans(12, 3) == [(0, 4), (4, 8), (8, 12)]
    assert spans(64, 4, unit=32, rule="replicated") == [(0, 32), (0, 32), (32, 64), (32, 64)]
    assert spans(64, 2, unit=16, rule="replicated") == [(0, 32), (32, 64)]
    assert spans(97, 4, unit=16, rule="uneven") == [(0, 16), (16, 48), (48, 80), (80, 97)]
    assert spans(49152, 2, unit=16, rule="uneven") == [(0, 24576), (24576, 49152)]
    assert spans(32, 4, unit=32, rule="replicated") == [(0, 32)] * 4


@pytest.mark.parametrize("rule", ["even", "replicated", "uneven"])
@pytest.mark.parametrize("unit", [1, 3, 16])
def test_allowed_counts_cover_the_axis_in_whole_units(rule: Any, unit: int) -> None:
    for whole in (48, 96, 97, 144):
        for stored in (1, 2, 16, 32):
            for size in Shard(whole, unit=unit, rule=rule).allowed(stored):
                shards = [Shard(whole, rank, size, unit=unit, rule=rule) for rank in range(size)]
                covered = {i for shard in shards for i in range(shard.start, shard.stop)}
                assert covered == set(range(whole))
                assert all(shard.count for shard in shards)
                for shard in shards:
                    if not shard.is_whole:
                        Axis(0, stored).span(shard)  # raises if it splits a unit


def test_the_last_unit_may_be_partial() -> None:
    shard = Shard(300, 1, 2, unit=128, rule="uneven")
    assert Axis(0, 128).span(shard) == slice(1, 3)
    with pytest.raises(ValueError, match="split a stored unit of 128"):
        Axis(0, 128).span(Shard(300, 0, 2))


def test_linear_layers_see_local_sizes(plain: Path) -> None:
    make, checkpoint = network_of(plain, dtype="float32")
    network = make(FakeGroup(1, 2))
    load(network, checkpoint, CPU)
    layers = {path: m for path, m in network.named_modules() if isinstance(m, Linear)}
    qkv, o, gate_up, down = (
        layers[f"model.layers.0.{name}"]
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    )
    assert qkv.parts == {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    assert (qkv.num_in, o.num_in, down.num_in) == (256, 256, 256)
    assert (o.parts, down.parts) == ({"o_proj": 256}, {"down_proj": 256})
    assert gate_up.parts == {"gate_proj": 256, "up_proj": 256}
    assert isinstance(down.weight, nn.Parameter)
    assert down.weight.shape == (256, 256)


def test_adapter_slots_have_local_sizes(plain: Path) -> None:
    make, checkpoint = network_of(plain, dtype="float32")
    network = make(FakeGroup(1, 2))
    load(network, checkpoint, CPU)
    config = EngineConfig.of(model=str(plain)).model
    hparams = load_hparams(resolve(config), config)
    Bank(network, hparams, make_parts(hparams), num_slots=1, max_rank=4)
    attention = network.model.layers[0].self_attn
    assert attention.qkv_proj.lora.stacks.sizes == (256, 128, 128)
    assert attention.o_proj.lora.stacks.down.shape == (2, 1, 4, 256)


def test_a_flat_tensor_has_the_size_of_its_matrix(tmp_path: Path) -> None:
    save_file({"x": torch.arange(24, dtype=torch.uint8).view(24, 1)}, tmp_path / "x.safetensors")
    checkpoint = SafetensorsCheckpoint([tmp_path / "x.safetensors"])
    region = (slice(1, 3), slice(2, 4))
    assert checkpoint.read("x", (4, 6), region).tolist() == [[8, 9], [14, 15]]
    with pytest.raises(CheckpointError, match=r"x has shape \[24, 1\], the network needs \[4, 5\]"):
        checkpoint.read("x", (4, 5))
