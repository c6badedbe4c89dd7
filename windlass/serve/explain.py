"""Explains the latency of a request: its trace as JSON, one sentence, and a setting.

The sentence names the largest share of the time. A setting is suggested only if the recorded
numbers show that it would have helped, and with which value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.core.card import EngineReport
from windlass.core.tiers import RECOMPUTED
from windlass.core.trace import BATCH, BLOCKERS, BLOCKS, SEQUENCES, RequestTrace

Json = dict[str, Any]

_DECIMALS = 6


def _s(seconds: float) -> float:
    return round(max(0.0, seconds), _DECIMALS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """The latency of one request in seconds, by phase."""

    before: float  # in the HTTP process: reading, chat template, tokenizing, sending
    queued: float
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0  # in the queue after a preemption

    @property
    def total(self) -> float:
        return self.before + self.queued + self.prefill + self.decode + self.preempted


def phases_of(trace: RequestTrace, began: float) -> Phases:
    """Split the time since `began` into phases; `preempted` is not part of prefill or decode."""
    times, preempted = trace.timeline, trace.waited_again_s
    before = max(0.0, times.arrived - began)
    if times.admitted is None:
        return Phases(before=before, queued=trace.ended - times.arrived)
    queued = times.admitted - times.arrived
    if times.first_token is None:
        prefill = trace.ended - times.admitted - preempted
        return Phases(before=before, queued=queued, prefill=prefill, preempted=preempted)
    prefill, decode = times.first_token - times.admitted, trace.ended - times.first_token
    # Nearly all preemptions happen during decode.
    in_decode = min(preempted, decode)
    return Phases(
        before=before,
        queued=queued,
        prefill=prefill - (preempted - in_decode),
        decode=decode - in_decode,
        preempted=preempted,
    )


def seconds_json(phases: Phases) -> Json:
    return {
        "total": _s(phases.total),
        "server": _s(phases.before),
        "queued": _s(phases.queued),
        "prefill": _s(phases.prefill),
        "decode": _s(phases.decode),
        "preempted": _s(phases.preempted),
    }


def trace_json(trace: RequestTrace, began: float) -> Json:
    """Format a trace, by phase."""
    phases, times = phases_of(trace, began), trace.timeline
    named = zip(BLOCKERS, trace.blocked_s, strict=True)
    blocked = {name: _s(seconds) for name, seconds in named if seconds > 0.5e-6}
    rest = phases.queued + phases.preempted - sum(trace.blocked_s)
    if rest > 0.5e-6:
        blocked["step"] = _s(rest)  # the step that was running when the request arrived
    body: Json = {
        "finish": trace.finish,
        "prompt_tokens": times.num_prompt,
        "output_tokens": times.num_output,
        "seconds": seconds_json(phases),
        "queue": {
            "ahead": trace.num_ahead,
            "running": trace.num_running,
            "blocked_by": blocked,
            "blocks_short": trace.short_blocks,
        },
        "prompt": {
            "cached_tokens": times.num_cached,
            "loaded_tokens": trace.loaded,
            "tier_decision": trace.tier_decision or None,
            "first_missed": trace.first_miss,
            "why_missed": trace.why_missed or None,
            "num_chunks": times.num_chunks,
            "chunks": [chunk._asdict() for chunk in trace.chunks],
        },
        "decode": _decode_json(trace, phases),
        "engine_seconds": {
            "prefill": _s(trace.prefill_s),
            "decode": _s(trace.decode_s),
            "saved_by_cache": _s(trace.saved_s),
        },
    }
    if times.num_preemptions:
        body["preemptions"] = {
            "count": times.num_preemptions,
            "waited_seconds": _s(trace.waited_again_s),
            "recomputed_tokens": trace.num_recomputed,
            "recomputed_seconds": _s(trace.recomputed_s),
        }
    if trace.why_ended:
        body["why_ended"] = trace.why_ended
    if trace.drafted:
        body["drafts"] = _drafts_json(trace)
    if trace.handover is not None:
        body["handover"] = {
            "engines": 1 + trace.handover.is_split,
            "blocks": trace.handover.num_blocks,
            "seconds": _s(trace.handover.seconds),
            "reason": trace.handover.reason or None,
        }
    return body


def _decode_json(trace: RequestTrace, phases: Phases) -> Json:
    count = max(0, trace.timeline.num_output - 1)
    smallest, median, largest = trace.batch or (None, None, None)
    return {
        "tokens": count,
        "seconds_per_token": _s(phases.decode / count) if count else None,
        "batch": {"min": smallest, "median": median, "max": largest},
        "seconds_beside_prompts": _s(trace.mixed_steps_s),
    }


def _drafts_json(trace: RequestTrace) -> Json:
    """Format draft tokens by position: a row with three has one at each of positions 0 to 2."""
    return {
        "proposed": trace.timeline.num_drafted,
        "accepted": trace.timeline.num_accepted,
        "per_position": [
            {"proposed": sum(trace.drafted[at:]), "accepted": sum(trace.accepted[at:])}
            for at in range(1, len(trace.drafted))
        ],
    }


def explain_trace(trace: RequestTrace, began: float, report: EngineReport) -> Json:
    """Name the largest share of the time, and the setting that would have helped, if any."""
    phases = phases_of(trace, began)
    parts = {
        "server": phases.before,
        "prefill": phases.prefill,
        "decode": phases.decode - trace.recomputed_s,
        "redone": trace.recomputed_s,
        **dict(zip(BLOCKERS, trace.blocked_s, strict=True)),
    }
    parts["step"] = phases.queued + phases.preempted - sum(trace.blocked_s)
    top = max(parts, key=lambda name: parts[name])
    share = f"{_time(parts[top])} of {_time(phases.total)}"
    sentence = f"{share} {_describe(top, trace, phases=phases, report=report)}."
    if trace.why_ended:
        sentence += f" The request ended because {trace.why_ended.rstrip('.')}."
    return {
        "dominated_by": top,
        "sentence": sentence,
        "setting": _setting(top, trace, report),
    }


def _describe(top: str, trace: RequestTrace, *, phases: Phases, report: EngineReport) -> str:
    times = trace.timeline
    running, ahead = _many(trace.num_running, "running request"), _many(trace.num_ahead, "other")
    if top == "prefill":
        cached = f"; {times.num_cached:,} more were cached" if times.num_cached else ""
        if trace.tier_decision.startswith(RECOMPUTED):
            cached += f" ({trace.tier_decision})"
        computed = times.num_prompt - times.num_cached
        return (
            f"were spent computing the prompt: {_many(computed, 'token')} in "
            f"{_many(times.num_chunks, 'step')}{cached}"
        )
    if top == "decode":
        return f"were spent generating {_many(times.num_output, 'token')}{_pace(trace, phases)}"
    preemptions = ""
    if times.num_preemptions:
        preemptions = f", after {_many(times.num_preemptions, 'preemption')} due to a full KV cache"
    descriptions = {
        "server": "were spent in the HTTP process before the engine got the request: chat template, "
        "tokenizing, sending",
        "redone": f"were spent recomputing {_many(trace.num_recomputed, 'token')}{preemptions}",
        "sequences": f"were spent waiting for one of {report.max_num_seqs:,} running slots "
        f"(--max-num-seqs), behind {ahead} in the queue",
        "tokens": f"were spent waiting for the token budget of full steps "
        f"({report.max_num_batched_tokens:,} tokens), behind {ahead} in the queue",
        "blocks": f"were spent waiting for free KV blocks behind {running}{preemptions}",
        "adapter": "were spent waiting for its adapter to load, or for a free adapter slot",
        "shared prefix": "were spent waiting for another request that was computing the same "
        "prefix, which avoided computing it twice",
        "batch": "were spent waiting for its batch to start (--batching)",
        "sample": f"were spent waiting to resume{preemptions}",
        "slo": f"were spent waiting behind {ahead}, since --slo-tpot-ms keeps steps short",
        "grammar": "were spent waiting for its grammar to be compiled",
        "tenants": "were spent waiting behind requests of other tenants, which had been served "
        "fewer tokens for their weight",
        "kv": "were spent waiting for KV blocks of its prefix to be loaded from a tier"
        + (f" ({trace.tier_decision})" if trace.tier_decision else ""),
        "step": "were spent waiting for the step that was running when the request arrived",
    }
    return descriptions[top]


def _pace(trace: RequestTrace, phases: Phases) -> str:
    count = trace.timeline.num_output - 1
    if count < 1 or trace.batch is None:
        return ""
    smallest, median, largest = trace.batch
    batches = f"batches of {smallest}"
    if smallest != largest:
        batches = f"batches of {smallest} to {largest} (median {median})"
    return f", {_time(phases.decode / count)} each, in {batches}"


def _setting(top: str, trace: RequestTrace, report: EngineReport) -> Json | None:
    """The flag and value that follow from the trace; None: no setting would have helped."""
    capacity = report.capacity
    if top == BLOCKERS[BLOCKS] or (top == "redone" and trace.timeline.num_preemptions):
        tokens = trace.timeline.num_prompt + trace.timeline.num_output
        lacking = trace.short_blocks or capacity.layout.blocks_for(tokens)
        extra_mib = lacking * capacity.bytes_per_block / 2**20
        why = f"it lacked {_many(lacking, 'block')}, {extra_mib:,.1f} MiB of KV cache"
        return _flag("--num-blocks", capacity.num_blocks + lacking, why)
    if top == BLOCKERS[SEQUENCES]:
        why = f"{_many(trace.num_ahead, 'request')} waited before it, and all slots were taken"
        return _flag("--max-num-seqs", report.max_num_seqs + trace.num_ahead + 1, why)
    if top == BLOCKERS[BATCH]:
        return _flag("--batching", "continuous", "requests then start as soon as they fit")
    if top == "prefill" and len(trace.chunks) > 1:
        had_room = [chunk for chunk in trace.chunks[:-1] if _had_room(chunk.step_tokens, report)]
        if had_room:
            why = f"{_many(len(had_room), 'step')} of its prompt had room for more prompt tokens"
            return _flag("--long-prefill-token-threshold", 0, why)
    return None


def _had_room(step_tokens: int, report: EngineReport) -> bool:
    return step_tokens < report.max_num_batched_tokens


def _flag(name: str, value: object, why: str) -> Json:
    return {"flag": name, "value": value, "why": why}


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:,.1f} s"
    return f"{1e3 * max(0.0, seconds):.2g} ms"
