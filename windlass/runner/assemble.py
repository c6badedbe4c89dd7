"""Builds the runner of a loaded network: KV cache, executors, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.config import AUTO, EngineConfig, Limits
from windlass.core.card import Capacity, Choice
from windlass.core.kv_layout import tokens_in_flight
from windlass.core.types import SlotId
from windlass.kernels.batch import KVCache
from windlass.kernels.experts import ExpertMLP
from windlass.kernels.prepared import Prepared
from windlass.layers.linear import Linear
from windlass.layers.moe import ExpertStack
from windlass.models.hparams import HParams
from windlass.models.network import rank_heads
from windlass.parallel.groups import least
from windlass.runner.cuda.graphs import AtStart
from windlass.runner.cuda.start_steps import StartSteps, bytes_kept, free_after_sync
from windlass.runner.device import (
    KVFormat,
    check_cache_fits,
    check_tables_fit,
    other_processes_bytes,
    resident_bytes,
    size_cache,
)
from windlass.runner.device_sampler import DeviceSampler
from windlass.runner.eager import EagerExecutor, ReferenceMetadata, RunnerParts
from windlass.runner.executor import Executor
from windlass.runner.kv_copies import reserved_bytes
from windlass.runner.kv_records import RecordLayout
from windlass.runner.load import Loaded, kv_format_of, stage_layout
from windlass.runner.pipeline import NoSampling, Pipeline
from windlass.runner.pooling import Pooler
from windlass.runner.runner import Runner
from windlass.runner.sampler import Sampler, draw_with
from windlass.runner.sampling import HostSampling, Sampling
from windlass.runner.sequence_parallel import SequenceParallel
from windlass.runner.slots import SlotTables
from windlass.runner.warmup import warmup_plans
from windlass.start_log import Phase, untimed

# Max bytes of float32 logits for draft tokens.
_DRAFT_LOGITS_BYTES = 64 * 2**20
# Host memory per slot and per block id in the tables of the runner and the scheduler.
_SLOT_BYTES = 64
_BLOCK_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class DrafterKV:
    """The KV cache of a drafter, indexed by the target's block ids.

    `identity`: names everything but the tokens that its keys and values depend on.
    """

    cache: KVCache
    identity: str


@dataclass(frozen=True, slots=True)
class Assembled:
    """A runner with its KV cache and limits."""

    runner: Runner
    cache: KVCache
    capacity: Capacity
    kv_format: KVFormat
    max_model_len: int
    max_positions_per_step: int  # sampled positions per step
    memory: dict[str, int]
    choices: list[Choice]
    drafter_kv: DrafterKV | None = None

    @property
    def caches(self) -> list[KVCache]:
        """The KV caches whose pages of a block are saved together."""
        return [self.cache, *([] if self.drafter_kv is None else [self.drafter_kv.cache])]

    @property
    def record_bytes(self) -> int:
        """Bytes of one block on this rank, as KV tiers store it."""
        return RecordLayout(self.caches).record_bytes


def make_runner(
    config: EngineConfig,
    hparams: HParams,
    loaded: Loaded,
    limits: Limits,
    *,
    beside: int = 0,
    one_table: bool = False,
    pooler: Pooler | None = None,
    phase: Phase = untimed,
) -> Assembled:
    """Size and allocate the KV cache after the weights are loaded, and build the runner.

    `beside`: bytes per token to leave free for a proposer's own KV. `one_table`: plans have one block
    table per row, as those of proposers do. A layout of several groups then becomes one group, which
    frees no block behind a window.
    """
    parts = loaded.parts
    kv_format = kv_format_of(config, hparams, parts)
    layout, size = kv_format.layout, kv_format.layout.block_size
    # A proposer uses the target's block ids, and may read keys behind the target's windows.
    one_table = one_table or config.speculation.spec != "none"
    if beside or (one_table and len(layout.groups) > 1):
        layout = layout.without_windows()
        kv_format = replace(kv_format, layout=layout)
    in_flight = tokens_in_flight(limits.max_num_batched_tokens, parts.mesh.pp.size)
    max_blocks = -(-parts.max_positions // size)
    table_bytes = _BLOCK_ID_BYTES * len(layout.groups) * max_blocks
    tables_bytes = limits.max_num_seqs * (_SLOT_BYTES + table_bytes)
    check_tables_fit(limits.max_num_seqs, tables_bytes)
    builder = _RunnerBuilder(
        config=config,
        hparams=hparams,
        loaded=loaded,
        limits=limits,
        kv_format=kv_format,
        pooler=pooler,
        phase=phase,
    )
    reserved = builder.measure() if parts.device.type == "cuda" else {}
    stage = stage_layout(layout, parts)
    record_bytes = stage.block_bytes + size * beside
    copying = reserved_bytes(
        config.cache, record_bytes, device=parts.device, num_ranks=parts.mesh.world.size
    )
    if copying:
        reserved["KV offload"] = copying
    capacity = size_cache(
        config.cache,
        stage,
        device=parts.device,
        share=limits.memory_share,
        wanted=limits.max_num_seqs * layout.blocks_for(parts.max_positions, in_flight),
        beside=size * beside,
        reserved=sum(reserved.values()),
    )
    capacity = replace(
        capacity, layout=layout
    )  # of all layers: the scheduler has block tables for every stage
    num_blocks = least(parts.mesh.world, capacity.num_blocks)
    if num_blocks < capacity.num_blocks:
        reason = f"the fewest of all ranks, less than here: {capacity.reason}"
        capacity = replace(capacity, num_blocks=num_blocks, reason=reason)
    check_cache_fits(config.cache, capacity, device=parts.device, reserved=sum(reserved.values()))
    runner, cache = builder.make_measured(capacity.num_blocks, reserved)
    max_model_len = parts.max_positions
    if config.model.max_model_len == AUTO:
        max_model_len = layout.max_tokens(capacity.num_blocks, in_flight, max_model_len)
    memory = {
        "weights": loaded.weight_bytes,
        "KV cache": cache.num_bytes,
        **reserved,
        "process": resident_bytes(),
        "other processes": other_processes_bytes(parts.device),
    }
    return Assembled(
        runner=runner,
        cache=cache,
        capacity=capacity,
        kv_format=kv_format,
        max_model_len=max_model_len,
        max_positions_per_step=sampled_positions(config, hparams, limits),
        memory=memory,
        choices=builder.choices,
    )


def make_draft_runner(
    config: EngineConfig,
    hparams: HParams,
    loaded: Loaded,
    limits: Limits,
    *,
    num_blocks: int,
    cache: KVCache | None,
) -> tuple[Runner, KVCache]:
    """A second runner with the same number of blocks; `cache`: KV pages shared with the target.

    The target has one block table, and the draft model's layers use it.
    """
    kv_format = kv_format_of(config, hparams, loaded.parts)
    builder = _RunnerBuilder(
        config=config,
        hparams=hparams,
        loaded=loaded,
        limits=limits,
        kv_format=replace(kv_format, layout=kv_format.layout.without_windows()),
    )
    return builder.make(num_blocks, cache)


class _RunnerBuilder:
    """Builds runners over one network: one to measure memory, then the real one."""

    def __init__(
        self,
        config: EngineConfig,
        hparams: HParams,
        loaded: Loaded,
        limits: Limits,
        kv_format: KVFormat,
        pooler: Pooler | None = None,
        phase: Phase = untimed,
    ) -> None:
        self._config = config
        self._phase = phase
        self._pooler = pooler or Pooler()
        self._hparams = hparams
        self._loaded = loaded
        self._limits = limits
        self._kv_format = kv_format
        self._launch_bound = 0  # tokens up to which steps wait for the host's launches
        self.choices: list[Choice] = []  # start-up lines
        parts = loaded.parts
        self._sequence_parallel = SequenceParallel.of(
            config.parallel, parts.mesh.tp, limits=limits, device=parts.device
        )
        if self._sequence_parallel is not None:
            self.choices.append(self._sequence_parallel.choice)
        self._pipeline = Pipeline(
            parts.mesh.pp,
            layers=range(0) if parts.stage is None else parts.stage.layers,
            hidden_size=hparams.hidden_size,
            dtype=parts.dtype,
            device=parts.device,
        )

    def make(
        self,
        num_blocks: int,
        cache: KVCache | None = None,
        *,
        at_start: AtStart | None = AtStart.ALL,
        splits: bool = True,
    ) -> tuple[Runner, KVCache]:
        """A runner with `num_blocks` KV blocks, and its cache.

        `at_start`: the steps that are captured now, where they can be; None: none ever. `splits`: some
        steps may be split over the ranks.
        """
        parts = self._loaded.parts
        size, seqs = self._kv_format.layout.block_size, self._limits.max_num_seqs
        on_cuda = parts.device.type == "cuda"
        # Two extra pages on CUDA: one for padding rows, one for the KV of draft siblings.
        kv_format = self._kv_format
        cache = cache or KVCache(
            stage_layout(kv_format.layout, parts),
            num_blocks + 2 * on_cuda,
            dtype=kv_format.dtype,
            device=parts.device,
        )
        max_blocks = -(-parts.max_positions // size)
        slots = SlotTables(
            num_slots=seqs,
            max_blocks=max_blocks,
            block_size=size,
            device=parts.device,
            scratch=num_blocks,
            num_groups=len(kv_format.layout.groups),
        )
        runner_parts = RunnerParts(
            network=self._loaded.network,
            cache=cache,
            slots=slots,
            sampling=self._sampling(slots) if self._pipeline.is_last else NoSampling(),
            gemm=self._loaded.gemm,
            workers=parts.workers,
            pipeline=self._pipeline,
            pooler=self._pooler,
            coarse_prompts=self._rounds_coarsely(),
            sequence_parallel=self._sequence_parallel if splits else None,
        )
        executors = self._executors(runner_parts, at_start)
        return Runner(runner_parts, executors), cache

    def make_measured(self, num_blocks: int, reserved: dict[str, int]) -> tuple[Runner, KVCache]:
        """The runner that serves. Replaces the estimate for the graphs in `reserved` by their bytes."""
        at_start, device = self.sizes_at_start(), self._loaded.parts.device
        if "graphs" not in reserved:
            with self._phase("record steps"):
                return self.make(num_blocks, at_start=at_start)
        with self._phase("capture CUDA graphs"):
            before = free_after_sync(device)
            runner, cache = self.make(num_blocks, at_start=at_start)
            used = before - free_after_sync(device) - cache.num_bytes
        reserved["graphs"] = bytes_kept(used, reserved["graphs"], at_start)
        return runner, cache

    def _sampling(self, slots: SlotTables) -> Sampling:
        ops, vocab_size = self._loaded.parts.ops, self._hparams.vocab_size
        threshold = self._config.speculation.threshold
        if ops.is_triton:
            return DeviceSampler(slots, vocab_size=vocab_size, threshold=threshold)
        sampler = Sampler(
            vocab_size=vocab_size, device=slots.device, threshold=threshold, draw=draw_with(ops)
        )
        return HostSampling(sampler, slots)

    def _executors(self, parts: RunnerParts, at_start: AtStart | None) -> list[Executor]:
        """The executors of this device, the fastest first."""
        if self._loaded.parts.ops.is_triton:
            from windlass.runner.cuda.executors import cuda_executors

            hparams, speculation = self._hparams, self._config.speculation
            mesh = self._loaded.parts.mesh
            return cuda_executors(
                parts,
                heads=rank_heads(hparams, mesh),
                num_kv_heads=max(
                    rank_heads(hparams, mesh, layer).num_kv for layer in range(hparams.num_layers)
                ),
                latent=hparams.mla is not None,
                max_rows=self._limits.max_num_seqs,
                max_tokens=self._limits.max_num_batched_tokens,
                launch_bound=self._launch_bound,
                max_draft_tokens=0 if speculation.spec == "none" else speculation.max_draft_tokens,
                at_start=at_start if self._why_eager is None else None,
            )
        return [*self._program(parts), EagerExecutor(parts, ReferenceMetadata(parts.slots))]

    def sizes_at_start(self) -> AtStart:
        """Which graphs are captured at start; the others are while the engine is idle. Adds a start-up line."""
        if not self._config.model.lazy_capture:
            return AtStart.ALL
        parts, flag = self._loaded.parts, "--lazy-capture"
        value, why = "some sizes at start, the others while idle", flag
        if not parts.ops.is_triton or self._why_eager is not None:
            value, why = "none", f"no step is captured, so {flag} has no effect"
        elif parts.mesh.world.size > 1:
            value, why = "all at start", f"ranks capture together, so {flag} has no effect"
        self.choices.append(Choice("CUDA graphs", value, why))
        return AtStart.SPREAD if why == flag else AtStart.ALL

    @property
    def _why_eager(self) -> str | None:
        """The reason to run every step eagerly; None if steps may be captured or recorded."""
        if self._config.model.enforce_eager:
            return "--enforce-eager"
        return self._loaded.network.why_eager

    def _program(self, parts: RunnerParts) -> list[Executor]:
        """The recorded program, if every operation is native; adds a start-up line."""
        why = None if self._loaded.parts.ops.is_native else "not every operation is native"
        why = self._why_eager or why
        if why is not None:
            self.choices.append(Choice("steps", "operator by operator", why))
            return []
        from windlass.kernels.native.program import ProgramLimits
        from windlass.runner.program import try_program

        positions = sampled_positions(self._config, self._hparams, self._limits)
        limits = ProgramLimits(self._limits.max_num_batched_tokens, positions)
        executors, choice = try_program(parts, limits)
        self.choices.append(choice)
        return executors

    def _rounds_coarsely(self) -> bool:
        """Whether prompt activations are rounded coarsely; adds a start-up line."""
        prepared: list[Prepared | ExpertMLP] = []
        for module in self._loaded.network.modules():
            if isinstance(module, Linear):
                prepared += [gemm.prepared for gemm in module.gemms]
            elif isinstance(module, ExpertStack) and module.prepared is not None:
                prepared.append(module.prepared.mlp)
        count = sum(each.coarse_prompts for each in prepared)
        if count == 0:
            return False
        rounding = self._config.scheduler.prompt_rounding
        held = f"{count} of {len(prepared)} GEMMs"
        self.choices.append(
            Choice("inputs of prompts", f"{rounding} ({held})", "--prompt-rounding")
        )
        return rounding == "coarse"

    def measure(self) -> dict[str, int]:
        """Bytes of the captured graphs and of the largest step, measured by running them.

        This also compiles the kernels of steps that no graph covers, and finds out which steps wait for
        the host's launches.
        """
        parts = self._loaded.parts
        if not parts.ops.is_triton:
            return {}
        steps = StartSteps(
            lambda at_start: self.make(1, at_start=at_start, splits=False)[0],
            warmup_plans(
                max_tokens=self._limits.max_num_batched_tokens,
                max_rows=self._limits.max_num_seqs,
                max_positions=parts.max_positions,
                slot=SlotId(self._limits.max_num_seqs),
            ),
            device=parts.device,
            num_ranks=parts.mesh.world.size,
            captures=self._why_eager is None,
        )
        with self._phase("compile kernels"):
            steps.compile()
        with self._phase("run the largest steps"):
            activations, times = steps.run_largest(self._pipeline.drain)
        if times is not None:
            self._launch_bound = times.launch_bound
            self.choices.append(times.choice(self._limits.max_num_batched_tokens))
        with self._phase("measure CUDA graphs"):
            graphs = steps.graph_bytes()
        return {"graphs": graphs, "activations": activations}


def sampled_positions(config: EngineConfig, hparams: HParams, limits: Limits) -> int:
    """Max sampled positions per step: one per request, plus draft tokens within a memory bound."""
    seqs, speculation = limits.max_num_seqs, config.speculation
    if speculation.spec == "none":
        return seqs
    affordable = _DRAFT_LOGITS_BYTES // (4 * hparams.vocab_size)
    drafts = max(speculation.max_draft_tokens, min(seqs * speculation.max_draft_tokens, affordable))
    return min(limits.max_num_batched_tokens, seqs + drafts)
