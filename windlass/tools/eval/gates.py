"""Quality gates: limits on measured quality, and the check before a server starts."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from windlass.config import EngineConfig, GateConfig
from windlass.errors import ConfigError, QualityError, WorkerDied
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.metrics import Comparison, Quality
from windlass.tools.eval.run import measure, progress_bar
from windlass.tools.eval.windows import Cut


def misses(quality: Quality, gate: GateConfig) -> list[str]:
    """Return a sentence for each missed limit, with the difference. NaN misses every limit."""
    found = quality.against
    if found is None:
        raise ConfigError("a quality gate needs a reference.")
    sentences = []
    limit = gate.min_agreement
    if limit is not None and not found.agreement >= limit:
        sentences.append(
            f"top-1 agreement {found.agreement:.4%} is {100 * (limit - found.agreement):.4f} points "
            f"below --min-agreement {limit:.4g}."
        )
    limit, increase = gate.max_ppl_increase, found.ppl_ratio - 1
    if limit is not None and not increase <= limit:
        sentences.append(
            f"perplexity {quality.perplexity:.4f} versus {found.reference_perplexity:.4f} is an "
            f"increase of {increase:.4%}, {100 * (increase - limit):.4f} points above "
            f"--max-ppl-increase {limit:.4g}."
        )
    limit = gate.max_kl
    if limit is not None and not found.kl_mean <= limit:
        sentences.append(
            f"mean KL {found.kl_mean:.6f} is {found.kl_mean - limit:.6f} above --max-kl {limit:.4g}."
        )
    return sentences


def enforce(quality: Quality, gate: GateConfig) -> None:
    """Raise QualityError if a limit is missed."""
    missed = misses(quality, gate)
    if missed:
        raise QualityError("the quality gate was missed: " + " ".join(missed))


def is_enabled(gate: GateConfig) -> bool:
    """Whether the server has a gate; raise ConfigError for an incomplete one."""
    if gate.gate_data is not None:
        if not gate.has_limits:
            raise ConfigError(
                "--gate-data needs a limit: --min-agreement, --max-ppl-increase or --max-kl."
            )
        return True
    if gate != GateConfig():
        raise ConfigError("a quality gate needs text to measure on: give --gate-data.")
    return False


def run_gate(config: EngineConfig, reference: EngineConfig, gate: GateConfig) -> str:
    """Measure in a separate process, so that its memory is free when the server starts.

    Return a line to print; raise QualityError if a limit is missed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            quality = pool.submit(_measure, config, reference, gate).result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "the process that measures the quality died, possibly out of memory: it holds the "
                "model and its reference."
            ) from error
    enforce(quality, gate)
    found = quality.against
    assert found is not None
    return f"quality gate passed on {gate.gate_data}: {_summary(quality, found)}"


def _measure(config: EngineConfig, reference: EngineConfig, gate: GateConfig) -> Quality:
    assert gate.gate_data is not None
    cut = Cut(context=gate.gate_context, max_windows=gate.gate_max_windows)
    with progress_bar(shown=True) as watch:
        outcome = measure(config, reference, read_corpus(gate.gate_data), cut, watch)
    if not outcome.complete:
        raise KeyboardInterrupt
    return outcome.overall


def _summary(quality: Quality, found: Comparison) -> str:
    return (
        f"agreement {found.agreement:.2%}, perplexity {quality.perplexity:.3f} versus "
        f"{found.reference_perplexity:.3f}, mean KL {found.kl_mean:.5f}, {quality.tokens:,} tokens"
    )
