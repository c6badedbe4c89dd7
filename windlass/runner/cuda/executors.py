"""Assembles the executors of a CUDA runner, and captures their graphs."""

from __future__ import annotations

import torch

from windlass.kernels.batch import Heads
from windlass.kernels.triton.attention import tile_tokens
from windlass.kernels.triton.latent import decode_parts
from windlass.runner.cuda.decode import DecodeGraphs, decode_forward
from windlass.runner.cuda.graphs import AtStart
from windlass.runner.cuda.metadata import DeviceMetadata
from windlass.runner.cuda.mixed import MixedForward, MixedGraphs, mixed_sizes
from windlass.runner.cuda.stage import GraphStage
from windlass.runner.cuda.verify import MAX_POSITIONS, VerifyForward, VerifyGraphs
from windlass.runner.eager import EagerExecutor, RunnerParts
from windlass.runner.executor import Executor


def cuda_executors(
    parts: RunnerParts,
    *,
    heads: Heads,
    num_kv_heads: int,
    latent: bool,
    max_rows: int,
    max_tokens: int,
    launch_bound: int,
    max_draft_tokens: int,
    at_start: AtStart | None,
) -> list[Executor]:
    """Decode, verification and mixed graphs, then eager steps.

    The last of several stages verifies eagerly. The others compute draft tokens in mixed graphs.
    `heads`: the largest of all layers; `num_kv_heads`: the most that a layer has.
    `latent`: attention is MLA, whose programs share one latent among some of the heads.
    `max_rows`: the largest decode batch to capture; `max_tokens`: of the largest step;
    `launch_bound`: tokens up to which steps wait for the host's launches (see `mixed_sizes`);
    `max_draft_tokens`: 0 if there is no speculation. `at_start`: the graphs to capture now, the others
    are captured later (`Executor.capture_next`); None: there are no graphs.
    """
    metadata = DeviceMetadata(
        parts.slots,
        tile=tile_tokens(heads.group),
        num_kv_heads=decode_parts(heads.num_q) if latent else num_kv_heads,
        num_positions=max(MAX_POSITIONS, 1 + max_draft_tokens),
        multiprocessors=torch.cuda.get_device_properties(parts.slots.device).multi_processor_count,
        latent=latent,
    )
    eager = EagerExecutor(parts, metadata)
    if at_start is None:
        return [eager]
    sizes = mixed_sizes(max_tokens, launch_bound)
    stage = GraphStage(parts, max(max_rows, sizes[-1]))
    mixed = MixedGraphs(
        MixedForward(parts, stage, metadata),
        stage,
        parts.slots,
        tile=metadata.tile,
        sizes=sizes,
        draft_length=max_draft_tokens,
        at_start=at_start,
    )
    forward = decode_forward(parts, stage, metadata)
    decode = DecodeGraphs(forward, stage, parts.slots, max_rows=max_rows, at_start=at_start)
    if not max_draft_tokens or not stage.is_whole:
        return [decode, mixed, eager]
    assert stage.sampler is not None
    verify = VerifyGraphs(
        VerifyForward(parts, stage.sampler, metadata=metadata, max_draft_tokens=max_draft_tokens),
        stage.sampler,
        parts.slots,
        max_rows=max_rows,
        max_draft_tokens=max_draft_tokens,
        at_start=at_start,
    )
    return [decode, verify, mixed, eager]
