"""Chooses device, dtype, kernels and weight formats, and loads the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from windlass.config import AUTO, EngineConfig, ModelConfig, ParallelConfig
from windlass.core.card import Choice
from windlass.core.expert_load import check_placements, read_placements
from windlass.core.kv_layout import KVLayout
from windlass.core.moe import ExpertPlacement
from windlass.errors import ConfigError
from windlass.kernels.copied import CopiedGemm
from windlass.kernels.experts import ExpertKernels, PreparedExperts
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.linears import Linears
from windlass.kernels.native.pool import Workers
from windlass.kernels.ops import Ops, choose_ops
from windlass.layers.expert_combine import ExpertCombine
from windlass.layers.linear import Linear
from windlass.layers.moe import ExpertStack
from windlass.layers.stored import StoredWeight
from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.methods import choose_methods
from windlass.models.network import Network, Parts, block_size_of, kernel_need, make_network
from windlass.models.rank_weights import (
    MAX_RANKS,
    RankDemand,
    RankShape,
    rank_network,
    smallest_fit,
)
from windlass.models.share import share_weights
from windlass.parallel.groups import GlooGroup, first_numbers
from windlass.parallel.mesh import Group, Mesh
from windlass.quant.unquantised import Unquantised
from windlass.runner.collectives import SymmetricMemoryGroup, choose_collectives
from windlass.runner.copies import Copies, choose_copies
from windlass.runner.device import (
    KVFormat,
    choose_device,
    choose_dtype,
    choose_kv_format,
    choose_threads,
    claimed_cpus,
    gib,
    kv_dtype,
    whole_bytes,
)
from windlass.start_log import Phase, untimed

# Options that decide how weights are stored and multiplied.
_WEIGHT_OPTIONS = (
    "dtype",
    "quantization",
    "quantize_head",
    "plain_kernels",
)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All choices made before weights are read, with reasons."""

    parts: Parts
    linears: Linears
    kv_format: KVFormat
    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine's network with its weights, and the choices made for it.

    Another engine may share the weights (`load_network`), not the network: its kernels run on the
    engine's pool, and its layers get the engine's adapters.
    """

    config: ModelConfig
    network: Network
    parts: Parts
    gemm: TorchGemm
    weight_bytes: int
    choices: list[Choice]
    why_not_batch_invariant: str | None  # the reason to refuse deterministic requests
    copies: Copies


def make_blueprint(
    config: EngineConfig,
    hparams: HParams,
    checkpoint: Checkpoint,
    *,
    workers: Workers | None = None,
    gemm: TorchGemm | None = None,
    mesh: Mesh | None = None,
) -> Blueprint:
    """Choose device, dtype, kernels, weight formats and context length.

    `workers`: of the engine that a draft model belongs to. `gemm`: tuned for the same weights.
    """
    mesh = mesh or Mesh()
    placements = _placements(config.parallel, hparams)
    where = choose_device(config.model)
    device = where.device
    if config.model.dequantized_copies and device.type == "cpu":
        raise ConfigError(
            "--dequantized-copies is for GPUs: on a CPU, packed weights are as fast for many rows. Leave "
            "the flag out."
        )
    threads = choose_threads(config.model, claimed_cpus(config.parallel))
    workers = workers or Workers(threads.count, cpus=threads.cpus)
    dtype, dtype_choice = choose_dtype(config.model, hparams, device)
    ops = choose_ops(
        kernel_need(
            hparams,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype(config.cache.kv_cache_dtype),
            plain=config.model.plain_kernels,
            workers=workers,
            mesh=mesh,
        )
    )
    mesh, collectives = choose_collectives(mesh, ops, device)
    longest, length_choice = _longest(config, hparams)
    linears = Linears(
        device,
        dtype,
        gemm or _gemm(ops, mesh.tp, device),
        plain=config.model.plain_kernels,
        reference=config.model.dtype == "float32",
        w4a8=config.model.quantization == "w4a8",
        copies=bool(config.model.dequantized_copies),
        workers=workers,
    )
    methods = choose_methods(config.model, hparams, checkpoint=checkpoint, linears=linears)
    parts = Parts(
        dtype=dtype,
        device=device,
        max_positions=longest,
        ops=ops,
        method_for=methods.method_for,
        mesh=mesh,
        expert_combine=config.parallel.expert_combine,
        table_dtype=methods.table_dtype,
        table_method=methods.table_method,
        per_layer_table_method=methods.per_layer_table_method,
        workers=workers,
        experts=ExpertKernels(
            device,
            dtype,
            plain=config.model.plain_kernels or config.model.dtype == "float32",
            workers=workers,
            count_load=config.parallel.counts_expert_load,
        ),
        placements=placements,
    )
    kv_format = kv_format_of(config, hparams, parts)  # refuse before loading weights
    choices = [
        where.choice,
        dtype_choice,
        threads.choice,
        *ops.choices,
        *collectives,
        methods.choice,
        length_choice,
    ]
    return Blueprint(parts=parts, linears=linears, kv_format=kv_format, choices=choices)


def _placements(config: ParallelConfig, hparams: HParams) -> dict[int, ExpertPlacement]:
    """The placements of the config's file, for the layers that it has. Checks the options for experts."""
    path, moe, record = config.expert_placement, hparams.moe, config.record_expert_load
    for flag, is_set in (
        ("--enable-expert-parallel", config.enable_expert_parallel),
        ("--record-expert-load", record is not None),
    ):
        if is_set and moe is None:
            raise ConfigError(f"{flag}: {hparams.architecture} has no experts. Omit the flag.")
    if record is not None and not Path(record).absolute().parent.is_dir():
        raise ConfigError(f"--record-expert-load {record}: its folder does not exist.")
    if path is None or moe is None:
        return {}
    placements = read_placements(path)
    layers = [layer for layer, has_experts in enumerate(moe.layers) if has_experts]
    check_placements(
        path,
        placements,
        num_ranks=config.tensor_parallel_size,
        num_experts=dict.fromkeys(layers, moe.routing.num_experts),
    )
    return placements


def kv_format_of(config: EngineConfig, hparams: HParams, parts: Parts) -> KVFormat:
    """The format of the KV cache. Raises for one that the kernels cannot read."""
    kv_cache_dtype, triton = config.cache.kv_cache_dtype, parts.ops.is_triton
    native = parts.ops.is_native and config.model.dtype != "float32"
    return choose_kv_format(
        kv_cache_dtype,
        hparams,
        block_size=block_size_of(config.cache.block_size, hparams),
        dtype=parts.dtype,
        device=parts.device,
        triton=triton,
        native=native,
        mesh=parts.mesh,
    )


def stage_layout(layout: KVLayout, parts: Parts) -> KVLayout:
    """The layout of the layers that this rank computes."""
    return layout if parts.stage is None else layout.stage(parts.stage.layers)


def load_network(
    config: EngineConfig,
    hparams: HParams,
    checkpoint: Checkpoint,
    *,
    weights: Loaded | None = None,
    workers: Workers | None = None,
    mesh: Mesh | None = None,
    phase: Phase = untimed,
) -> Loaded:
    """Build the network and load its weights, or this rank's shards of them.

    `weights`: share these instead of reading the checkpoint. `workers`: of the engine that a draft
    model belongs to.
    """
    gemm = None if weights is None else weights.gemm.twin()
    blueprint = make_blueprint(config, hparams, checkpoint, workers=workers, gemm=gemm, mesh=mesh)
    parts, stages = _cut(config, hparams, blueprint.parts)
    network = make_network(hparams, parts)
    if weights is None:
        layout = stage_layout(blueprint.kv_format.layout, parts)
        copies = choose_copies(config, hparams, network, parts=parts, layout=layout)
        blueprint.linears.copies = copies.made
        try:
            load(network, checkpoint, parts.device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(_does_not_fit(config, hparams, blueprint)) from error
    else:
        _check_same_weights(config.model, parts.device, weights)
        copies = weights.copies
        share_weights(network, weights.network, linears=blueprint.linears, experts=parts.experts)
    network.check()
    check_copies(config.model, network)
    copies = copies.loaded(network)
    layers = [module for module in network.modules() if isinstance(module, Linear)]
    plain = [weight for layer in layers for weight in layer.plain_weights]
    stored = [module for module in network.modules() if isinstance(module, StoredWeight)]
    experts = [each.prepared for each in stored if isinstance(each, ExpertStack) and each.prepared]
    choices = [
        *network.choices,
        *blueprint.choices,
        *stages,
        *memory(stored),
        *copies.choices(network),
        *_expert_choices(experts),
    ]
    if blueprint.parts.mesh.ep.size > 1:
        combines = [each for each in network.modules() if isinstance(each, ExpertCombine)]
        choices += dict.fromkeys(each.choice for each in combines)
    if plain and (parts.mesh.world.size == 1 or parts.device.type == "cuda"):
        with phase("choose GEMM kernels"):
            choices.append(Choice("GEMM", *blueprint.linears.gemm.tune(plain)))
    return Loaded(
        config=config.model,
        network=network,
        parts=parts,
        gemm=blueprint.linears.gemm,
        weight_bytes=network.weight_bytes,
        choices=choices,
        why_not_batch_invariant=network.why_eager
        or _why_not_batch_invariant(layers, experts)
        or _why_not_summed_in_order(hparams, parts, blueprint.linears.gemm),
        copies=copies,
    )


def _why_not_summed_in_order(hparams: HParams, parts: Parts, gemm: TorchGemm) -> str | None:
    """The reason why all-reduces cannot be batch-invariant, or None.

    Makes them batch-invariant in the batch-invariant steps of `gemm`.
    """
    ranks, why = (
        parts.mesh.tp,
        "NCCL sums more than two ranks in an order that depends on the batch",
    )
    if ranks.size <= 2 or parts.device.type != "cuda" or isinstance(ranks, GlooGroup):
        return None
    if not isinstance(ranks, SymmetricMemoryGroup):
        return why
    if (found := ranks.why_not_in_order(hparams.hidden_size, parts.dtype)) is not None:
        return f"{why}, and symmetric memory has no room: {found}"
    ranks.is_batch_invariant = lambda: gemm.is_batch_invariant
    return None


def _cut(config: EngineConfig, hparams: HParams, parts: Parts) -> tuple[Parts, list[Choice]]:
    """Add this rank's pipeline stage to the parts. Returns the start-up line, too."""
    count = parts.mesh.pp.size
    if count == 1:
        return parts, []
    mesh = parts.mesh
    shape = RankShape(tp=mesh.tp.size, pp=count, expert_parallel=mesh.ep.size > 1)
    network = rank_network(hparams, parts, shape)
    stages = network.stages(count)
    layers = " + ".join(str(len(stage.layers)) for stage in stages)
    held = " + ".join(gib(network.stage_bytes(stage)) for stage in stages)
    value, why = f"{count} stages of {layers} layers", f"{held} of weights on a rank of each"
    choice = Choice("pipeline", value, why)
    embeds_drafts = config.speculation.embeds_drafts
    return replace(parts, stage=stages[mesh.pp.rank], embeds_drafts=embeds_drafts), [choice]


def _does_not_fit(config: EngineConfig, hparams: HParams, blueprint: Blueprint) -> str:
    """The error text for weights that do not fit: the device's memory, and how many such devices suffice."""
    memory = whole_bytes(blueprint.parts.device)
    text = f"the weights do not fit into the {gib(memory)} of this device"
    if hparams.transformers is not None:
        return f"{text}. Quantise them with -q, or choose a smaller model."
    kv = blueprint.kv_format
    demand = RankDemand(
        kv_tokens=blueprint.parts.max_positions,
        block_size=kv.layout.block_size,
        kv_dtype=kv.dtype,
    )
    share = config.limits("cuda").memory_share
    shape = smallest_fit(hparams, blueprint.parts, demand=demand, memory=int(memory * share))
    if shape is None:
        return f"{text}, and not even {MAX_RANKS} such devices hold the model. Quantise it with -q."
    flags = f"--tensor-parallel-size {shape.tp} --pipeline-parallel-size {shape.pp}"
    return (
        f"{text}. The smallest number of such devices that holds the model and one request of "
        f"{demand.kv_tokens:,} tokens is {shape.num_ranks}: {flags}. Or quantise the weights with -q."
    )


def _check_same_weights(config: ModelConfig, device: torch.device, weights: Loaded) -> None:
    """Refuse to share weights that this config would store or multiply in another way."""
    pairs = {
        name: (getattr(config, name), getattr(weights.config, name)) for name in _WEIGHT_OPTIONS
    }
    pairs["device"] = device.type, weights.parts.device.type
    if config.dequantized_copies is not None:
        pairs["dequantized_copies"] = config.dequantized_copies, weights.copies.made
    for name, (wanted, held) in pairs.items():
        if wanted != held:
            raise ConfigError(
                f"the weights to share were loaded with {name} {held!r}, but this engine has {wanted!r}. "
                "Set both alike, or load the weights again."
            )


def _expert_choices(experts: list[PreparedExperts]) -> list[Choice]:
    """One start-up line per kernel of mixture-of-experts layers."""
    lines = Counter((each.form, each.kernel, each.reason) for each in experts)
    return [
        Choice("experts", f"{form}, {kernel} kernel, {count} layers", why)
        for (form, kernel, why), count in lines.items()
    ]


def _why_not_batch_invariant(layers: list[Linear], experts: list[PreparedExperts]) -> str | None:
    """The reason why some kernel is not batch-invariant; None if all are."""
    for each in experts:
        if not each.batch_invariant:
            return f"the {each.kernel} kernel of experts sums in an order that depends on the batch"
    for layer in layers:
        for gemm in layer.gemms:
            if not gemm.batch_invariant:
                return (
                    f"the {gemm.kernel} kernel of {gemm.form} weights sums in an order that "
                    "depends on the batch"
                )
    return None


def check_copies(config: ModelConfig, network: Network) -> None:
    """Raise ConfigError if copies of weights are wanted and there are none."""
    if not config.dequantized_copies:
        return
    stored = [each for each in network.modules() if isinstance(each, StoredWeight)]
    if not any(isinstance(gemm.prepared, CopiedGemm) for each in stored for gemm in each.gemms):
        forms = {gemm.form for each in stored for gemm in each.gemms} or {"not quantised"}
        raise ConfigError(
            "--dequantized-copies is for linear layers of 4- and 8-bit integers, with activations of 16 "
            f"bits, on a GPU; this model's weights are: {', '.join(sorted(forms))}. Leave the flag out."
        )


def memory(layers: Sequence[StoredWeight]) -> list[Choice]:
    """One start-up line per kind of quantised layer."""
    lines: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        for gemm in layer.gemms:
            held = f"{gemm.form}, {gemm.kernel} kernel"
            lines[layer.method.name, held, gemm.reason] += 1
        if isinstance(layer.method, Unquantised) and layer.method.name != layer.method.form:
            lines[layer.method.name, layer.method.form, layer.method.reason] += 1
    return [
        Choice(f"{name} weights", f"{held}, {count} of them", why)
        for (name, held, why), count in lines.items()
    ]


def _gemm(ops: Ops, sharing: Group, device: torch.device) -> TorchGemm:
    if not ops.is_triton:
        return TorchGemm()
    from windlass.kernels.triton.gemm import TunedGemm
    from windlass.kernels.triton.tiling_cache import open_tiling_cache

    agree = None if sharing.size == 1 else partial(first_numbers, sharing, device=device)
    return TunedGemm(agree, open_tiling_cache(device))


def _longest(config: EngineConfig, hparams: HParams) -> tuple[int, Choice]:
    """Choose the context length. Refuses a length beyond the model's own."""
    requested = config.model.max_model_len
    if requested is None or requested == AUTO:
        reason = "the model's own" if requested is None else "as much as the KV cache holds"
        return hparams.max_positions, Choice("context", f"{hparams.max_positions:,}", reason)
    if requested > hparams.max_positions:
        raise ConfigError(
            f"--max-model-len {requested} is more than the model's {hparams.max_positions} positions. "
            f"Lower it, or set max_position_embeddings with --hf-overrides if you know better."
        )
    return requested, Choice("context", f"{requested:,}", "as set")
