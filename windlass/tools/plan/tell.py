"""A prediction for people: the settings, the lines of `bench serve`, the cache, and the devices."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.tools.plan.what_if import Prediction

_WIDTH = 50
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHOWN_TOKENS = (128, 512)


def lines(found: Prediction, max_concurrency: int | None, request_rate: float) -> Iterator[str]:
    """As they are printed."""
    limits, capacity, run = found.limits, found.capacity, found.run
    yield (
        f"Settings: {limits.max_num_seqs:,} sequences ({limits.seqs_reason}), "
        f"{limits.max_num_batched_tokens:,} tokens a step ({limits.tokens_reason}), "
        f"{capacity.num_blocks:,} blocks of {capacity.block_size} tokens ({capacity.reason})."
    )
    yield from _costs(found)
    told = found.summary.lines(max_concurrency=max_concurrency, request_rate=request_rate)
    yield " Predicted Serving Result ".center(_WIDTH, "=")
    yield from told[1:-1]
    yield "KV cache and queue".center(_WIDTH, "-")
    for name, value in (
        ("KV in use, peak (%):", f"{100 * run.peak_kv:.2f}"),
        ("KV in use, mean (%):", f"{100 * run.mean_kv:.2f}"),
        ("Most requests waiting:", run.peak_waiting),
        ("Preemptions:", run.num_preemptions),
        ("Steps:", run.num_steps),
    ):
        yield f"{name:<40} {value}"
    yield "=" * _WIDTH
    for error, count in found.summary.errors.items():
        yield f"{count} would fail: {error}"
    yield from _promise(found)


def _costs(found: Prediction) -> Iterator[str]:
    costs, rows = found.steps.costs, [n for n in _SHOWN_ROWS if n <= found.limits.max_num_seqs]
    steps = ", ".join(f"{n}: {1e3 * costs.decode_seconds(n, 128):.1f}" for n in rows)
    most = found.limits.max_num_batched_tokens
    sizes = [n for n in _SHOWN_TOKENS if n < most] + [most]
    prompts = ", ".join(f"{n}: {1e3 * costs.tokens.of(n):.0f}" for n in sizes)
    yield (
        f"Steps ({found.steps.source}): ms by requests that decode {steps}; by tokens of prompts "
        f"{prompts}."
    )


def _promise(found: Prediction) -> Iterator[str]:
    if not found.slo.targets:
        return
    misses = found.slo.misses(found.summary)
    yield f"SLO {found.slo}: " + ("met." if not misses else f"missed: {'; '.join(misses)}.")
    for fleet in found.fleets:
        kept = "meets it" if not fleet.misses else f"misses it: {'; '.join(fleet.misses)}"
        yield (
            f"  {fleet.num_devices} x: {fleet.summary.output_throughput:,.1f} tok/s, goodput "
            f"{fleet.summary.request_goodput or 0.0:.2f} req/s, {kept}"
        )
    if found.fleets:
        enough = next((fleet for fleet in found.fleets if not fleet.misses), None)
        yield (
            f"Devices needed: {enough.num_devices}, each with a copy of the model."
            if enough is not None
            else f"Not even {found.fleets[-1].num_devices} devices keep it: more only help while "
            "requests wait for each other."
        )
