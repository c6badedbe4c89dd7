"""Whether a model is good enough: limits on what was measured, and the trial before a server starts."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from windlass.config import EngineConfig, GateConfig
from windlass.errors import ConfigError, QualityError, WorkerDied
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.metrics import Comparison, Quality
from windlass.tools.eval.progress import bar
from windlass.tools.eval.run import measure
from windlass.tools.eval.windows import Cut


def misses(quality: Quality, gate: GateConfig) -> list[str]:
    """A sentence for every limit that was missed, and by how much. A NaN misses every limit."""
    found = quality.against
    if found is None:
        raise ConfigError("a quality gate needs a reference.")
    sentences = []
    wish = gate.min_agreement
    if wish is not None and not found.agreement >= wish:
        sentences.append(
            f"top-1 agreement {found.agreement:.4%} is {100 * (wish - found.agreement):.4f} points "
            f"below --min-agreement {wish:.4g}."
        )
    wish, increase = gate.max_ppl_increase, found.ppl_ratio - 1
    if wish is not None and not increase <= wish:
        sentences.append(
            f"perplexity {quality.perplexity:.4f} against {found.reference_perplexity:.4f} is an "
            f"increase of {increase:.4%}, {100 * (increase - wish):.4f} points above "
            f"--max-ppl-increase {wish:.4g}."
        )
    wish = gate.max_kl
    if wish is not None and not found.kl_mean <= wish:
        sentences.append(
            f"mean KL {found.kl_mean:.6f} is {found.kl_mean - wish:.6f} above --max-kl {wish:.4g}."
        )
    return sentences


def judge(quality: Quality, gate: GateConfig) -> None:
    """Raise QualityError when a limit is missed."""
    missed = misses(quality, gate)
    if missed:
        raise QualityError("the quality gate was missed: " + " ".join(missed))


def check(gate: GateConfig) -> bool:
    """Whether a server must be tried first; settings that do nothing are refused."""
    if gate.gate_data is not None:
        if not gate.has_limits:
            raise ConfigError(
                "--gate-data needs a limit: --min-agreement, --max-ppl-increase or --max-kl."
            )
        return True
    if gate != GateConfig():
        raise ConfigError("a quality gate needs text to measure on: give --gate-data.")
    return False


def try_out(config: EngineConfig, reference: EngineConfig, gate: GateConfig) -> str:
    """Measure in a process of its own, whose memory is free again when the server starts.

    Returns a line to show; raises QualityError when a limit is missed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            quality = pool.submit(_measure, config, reference, gate).result()
        except BrokenProcessPool as error:
            raise WorkerDied(
                "the process that measures the quality died, perhaps for lack of memory: it holds "
                "the model and its reference at once."
            ) from error
    judge(quality, gate)
    found = quality.against
    assert found is not None
    return f"quality gate passed on {gate.gate_data}: {_summary(quality, found)}"


def _measure(config: EngineConfig, reference: EngineConfig, gate: GateConfig) -> Quality:
    assert gate.gate_data is not None
    cut = Cut(context=gate.gate_context, max_windows=gate.gate_max_windows)
    with bar(shown=True) as watch:
        outcome = measure(config, reference, read_corpus(gate.gate_data), cut, watch)
    if not outcome.complete:
        raise KeyboardInterrupt
    return outcome.overall


def _summary(quality: Quality, found: Comparison) -> str:
    return (
        f"agreement {found.agreement:.2%}, perplexity {quality.perplexity:.3f} against "
        f"{found.reference_perplexity:.3f}, mean KL {found.kl_mean:.5f}, {quality.tokens:,} tokens"
    )
