"""Why a request took as long as it did: its story as JSON, one sentence, and a setting.

The sentence names what took the most time. A setting is named only where the recorded numbers say
that it would have helped, and which value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windlass.core.card import EngineReport
from windlass.core.trace import (
    BATCH,
    BLOCKERS,
    BLOCKS,
    SEQUENCES,
    RequestTrace,
)

Json = dict[str, Any]

_DECIMALS = 6


def _s(seconds: float) -> float:
    return round(max(0.0, seconds), _DECIMALS)


@dataclass(frozen=True, slots=True)
class Phases:
    """Where the time of one request went, in seconds; together, all of it."""

    before: float  # in the server: reading, template, tokens, and the way to the engine
    queued: float
    prefill: float
    decode: float
    preempted: float  # waiting again

    @property
    def total(self) -> float:
        return self.before + self.queued + self.prefill + self.decode + self.preempted


def phases_of(trace: RequestTrace, began: float) -> Phases:
    """Preemptions are told apart from what they interrupted."""
    times, again = trace.timeline, trace.waited_again_s
    before = max(0.0, times.arrived - began)
    if times.admitted is None:
        return Phases(before, trace.ended - times.arrived, 0.0, 0.0, 0.0)
    queued = times.admitted - times.arrived
    if times.first_token is None:
        return Phases(before, queued, trace.ended - times.admitted - again, 0.0, again)
    prefill, decode = times.first_token - times.admitted, trace.ended - times.first_token
    # Nearly all preemptions come while tokens are generated.
    late = min(again, decode)
    return Phases(before, queued, prefill - (again - late), decode - late, again)


def trace_json(trace: RequestTrace, began: float) -> Json:
    """The facts, by phase."""
    phases, times = phases_of(trace, began), trace.timeline
    named = zip(BLOCKERS, trace.blocked_s, strict=True)
    blocked = {name: _s(seconds) for name, seconds in named if seconds > 0.5e-6}
    rest = phases.queued + phases.preempted - sum(trace.blocked_s)
    if rest > 0.5e-6:
        blocked["step"] = _s(rest)  # the one that was running when it came
    made: Json = {
        "finish": trace.finish,
        "prompt_tokens": times.num_prompt,
        "output_tokens": times.num_output,
        "seconds": {
            "total": _s(phases.total),
            "server": _s(phases.before),
            "queued": _s(phases.queued),
            "prefill": _s(phases.prefill),
            "decode": _s(phases.decode),
            "preempted": _s(phases.preempted),
        },
        "queue": {
            "ahead": trace.num_ahead,
            "running": trace.num_running,
            "blocked_by": blocked,
            "blocks_short": trace.short_blocks,
        },
        "prompt": {
            "cached_tokens": times.num_cached,
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
        made["preemptions"] = {
            "count": times.num_preemptions,
            "waited_seconds": _s(trace.waited_again_s),
            "recomputed_tokens": trace.num_recomputed,
            "recomputed_seconds": _s(trace.recomputed_s),
        }
    if trace.drafted:
        made["drafts"] = _drafts_json(trace)
    return made


def _decode_json(trace: RequestTrace, phases: Phases) -> Json:
    count = max(0, trace.timeline.num_output - 1)
    least, median, most = trace.batch or (None, None, None)
    return {
        "tokens": count,
        "seconds_per_token": _s(phases.decode / count) if count else None,
        "batch": {"min": least, "median": median, "max": most},
        "seconds_beside_prompts": _s(trace.mixed_steps_s),
    }


def _drafts_json(trace: RequestTrace) -> Json:
    """Guesses by their place in the row: a row with three has one at each of three places."""
    places = range(1, len(trace.drafted))
    return {
        "proposed": trace.timeline.num_drafted,
        "accepted": trace.timeline.num_accepted,
        "per_position": [
            {"proposed": sum(trace.drafted[at:]), "accepted": sum(trace.accepted[at:])}
            for at in places
        ],
    }


def explained(trace: RequestTrace, began: float, report: EngineReport) -> Json:
    """One sentence on what took the most time, and the setting that would have helped, if any."""
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
    return {
        "dominated_by": top,
        "sentence": f"{share} {_words(top, trace, phases, report)}.",
        "setting": _setting(top, trace, report),
    }


def _words(top: str, trace: RequestTrace, phases: Phases, report: EngineReport) -> str:
    times = trace.timeline
    running, ahead = _many(trace.num_running, "running request"), _many(trace.num_ahead, "other")
    if top == "prefill":
        cached = f"; {times.num_cached:,} more were cached" if times.num_cached else ""
        computed = times.num_prompt - times.num_cached
        return (
            f"computed the prompt: {_many(computed, 'token')} in "
            f"{_many(times.num_chunks, 'step')}{cached}"
        )
    if top == "decode":
        return f"generated {_many(times.num_output, 'token')}{_pace(trace, phases)}"
    again = ""
    if times.num_preemptions:
        again = f", after {_many(times.num_preemptions, 'preemption')} for lack of KV blocks"
    waits = {
        "server": "passed in the server before the engine had it: template, tokens, the way there",
        "redone": f"computed {_many(trace.num_recomputed, 'token')} again{again}",
        "sequences": f"were spent waiting for one of {report.max_num_seqs:,} places to run "
        f"(--max-num-seqs), behind {ahead} in the queue",
        "tokens": f"were spent waiting for room in steps that were full "
        f"({report.max_num_batched_tokens:,} tokens), behind {ahead} in the queue",
        "blocks": f"were spent waiting for free KV blocks behind {running}{again}",
        "adapter": "were spent waiting for its adapter to be read, or for a slot for it",
        "shared prefix": "were spent waiting for another request that computed the same prefix, "
        "which saved computing it twice",
        "batch": "were spent waiting for its batch to start (--batching)",
        "sample": f"were spent waiting to start again{again}",
        "grammar": "were spent waiting for its grammar to be compiled",
        "step": "were spent waiting for the step to end that was being computed when it came",
    }
    return waits[top]


def _pace(trace: RequestTrace, phases: Phases) -> str:
    count = trace.timeline.num_output - 1
    if count < 1 or trace.batch is None:
        return ""
    least, median, most = trace.batch
    beside = f"batches of {least}" if least == most else f"batches of {least} to {most}"
    typical = "" if least == most else f" (median {median})"
    return f", {_time(phases.decode / count)} each, in {beside}{typical}"


def _setting(top: str, trace: RequestTrace, report: EngineReport) -> Json | None:
    """The flag and value that follow from what was recorded; None: no setting does."""
    capacity = report.capacity
    if top == BLOCKERS[BLOCKS] or (top == "redone" and trace.timeline.num_preemptions):
        tokens = trace.timeline.num_prompt + trace.timeline.num_output
        short = trace.short_blocks or -(-tokens // capacity.block_size)
        more = short * capacity.bytes_per_block / 2**20
        why = f"it lacked {_many(short, 'block')}, {more:,.1f} MiB of KV cache"
        return _flag("--num-blocks", capacity.num_blocks + short, why)
    if top == BLOCKERS[SEQUENCES]:
        why = f"{_many(trace.num_ahead, 'request')} waited before it, and all places were taken"
        return _flag("--max-num-seqs", report.max_num_seqs + trace.num_ahead + 1, why)
    if top == BLOCKERS[BATCH]:
        return _flag("--batching", "continuous", "requests then start whenever they fit")
    if top == "prefill" and len(trace.chunks) > 1:
        cut = [chunk for chunk in trace.chunks[:-1] if _had_room(chunk.step_tokens, report)]
        if cut:
            why = f"{_many(len(cut), 'step')} of its prompt had room for more of it"
            return _flag("--long-prefill-token-threshold", 0, why)
    return None


def _had_room(step_tokens: int, report: EngineReport) -> bool:
    return step_tokens < report.max_num_batched_tokens


def _flag(name: str, value: object, why: str) -> Json:
    return {"flag": name, "value": value, "why": why}


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    if seconds >= 0.1:
        return f"{seconds:,.1f} s"
    return f"{1e3 * max(0.0, seconds):.2g} ms"
