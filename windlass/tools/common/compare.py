"""Compares a model with a reference model: quality on a text, and decode speed in alternating runs.

The speed of a shared CPU drifts within minutes. Each run of a format is therefore followed by a run
of the reference: the ratio of the two is stable even when neither speed is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from windlass.build import OpenModel, open_model
from windlass.build_scorer import BuiltScorer, build_scorer
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.models.network import Network
from windlass.runner.device import choose_device
from windlass.runner.load import Loaded
from windlass.runner.scoring import ScoredChunk, ScoringLimits
from windlass.tools.bench.speculation import TEXTS
from windlass.tools.bench.throughput import WindlassEngine
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find
from windlass.tools.eval.data import Corpus, Document
from windlass.tools.eval.metrics import Quality, Tally, compare
from windlass.tools.eval.windows import Cut, cut_corpus

# Reference logits up to this size are cached; larger ones are recomputed for every model.
_MAX_CACHED_BYTES = 2**32
_HEAD = "lm_head"
_SHORT = "eight short built-in texts"


def short_corpus() -> Corpus:
    """A small built-in corpus for a rough quality estimate."""
    return Corpus(_SHORT, [Document(_SHORT, "\n\n".join(TEXTS))], running=True)


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode tokens per second, and the ratio to the reference's in paired runs."""

    tok_s: float
    ratio: float


class QualityComparison:
    """Scores models on a text against a reference. Owns the reference's scorer and the text."""

    def __init__(
        self,
        reference: EngineConfig,
        opened: OpenModel,
        corpus: Corpus,
        cut: Cut,
        weights: Loaded | None = None,
    ) -> None:
        """`weights`: the reference's, if they are already loaded."""
        self._config = reference
        self._corpus = corpus
        self._cut = cut
        self._labelled = cut_corpus(corpus, opened.card, cut)
        self._windows = [item.window for item in self._labelled]
        steps = reference.limits(choose_device(reference.model).type)
        max_len = max(len(window.tokens) for window in self._windows)
        self._limits = ScoringLimits(max_len, steps.max_num_batched_tokens, steps.max_num_seqs)
        if max_len > opened.hparams.max_positions:
            raise ConfigError(
                f"a window of {max_len} tokens is more than the {opened.hparams.max_positions} "
                f"positions of {opened.card.name}. Use a smaller --context."
            )
        self._reference = build_scorer(
            reference, opened.source, limits=self._limits, weights=weights
        )
        self._cached: list[ScoredChunk] | None = None

    @property
    def reference(self) -> BuiltScorer:
        return self._reference

    def build(self, config: EngineConfig, weights: Loaded | None = None) -> BuiltScorer:
        """Build the scorer of a model, which must tokenize the text as the reference does."""
        if (config.model, config.cache) == (self._config.model, self._config.cache):
            return self._reference
        opened = open_model(config)
        if cut_corpus(self._corpus, opened.card, self._cut) != self._labelled:
            raise ConfigError(
                f"{opened.card.name} tokenizes the text differently from the reference."
            )
        return build_scorer(config, opened.source, limits=self._limits, weights=weights)

    def reference_quality(self) -> Quality:
        """The reference's own perplexity."""
        tally = Tally()
        for chunk in self._reference_chunks():
            targets = self._targets(chunk)
            if targets:
                tally.add(compare(chunk.values[: len(targets)], targets, None))
        return tally.quality()

    def compare(self, built: BuiltScorer) -> Quality:
        """A model's quality against the reference."""
        tally = Tally()
        for own, other in self._pairs(built):
            targets = self._targets(own)
            if targets:
                count = len(targets)
                tally.add(compare(own.values[:count], targets, other.values[:count]))
        return tally.quality()

    def _pairs(self, built: BuiltScorer) -> Iterator[tuple[ScoredChunk, ScoredChunk]]:
        if built is self._reference:
            return ((chunk, chunk) for chunk in self._reference_chunks())
        return zip(built.scorer.logits(self._windows), self._reference_chunks(), strict=True)

    def _reference_chunks(self) -> Iterator[ScoredChunk]:
        scorer = self._reference.scorer
        positions = sum(len(window.tokens) - window.first for window in self._windows)
        if positions * scorer.vocab_size * 4 > _MAX_CACHED_BYTES:
            return scorer.logits(self._windows)
        if self._cached is None:
            self._cached = list(scorer.logits(self._windows))
        return iter(self._cached)

    def _targets(self, chunk: ScoredChunk) -> list[int]:
        """The next token of each position; the last position of a window has none."""
        tokens = self._windows[chunk.window].tokens
        return list(tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.values)])


class SpeedComparison:
    """Measures engines in alternation with the reference's engine, which it owns."""

    def __init__(self, reference: EngineConfig, repeat: int, sizes: Sizes) -> None:
        self._workloads = {rows: find(f"decode_b{rows}", sizes) for rows in (1, 8)}
        self._repeat = repeat
        self._reference = self._engine(reference)

    def reference_speeds(self) -> dict[int, Speed]:
        return {
            rows: Speed(median(_run(self._reference, work, i) for i in range(self._repeat)), 1.0)
            for rows, work in self._workloads.items()
        }

    def compare(self, config: EngineConfig) -> dict[int, Speed]:
        """Speeds by batch size."""
        own = self._engine(config)
        speeds = {}
        for rows, work in self._workloads.items():
            pairs = [
                (_run(own, work, i), _run(self._reference, work, i)) for i in range(self._repeat)
            ]
            ratio = median(mine / other for mine, other in pairs)
            speeds[rows] = Speed(median(mine for mine, _ in pairs), ratio)
        return speeds

    def _engine(self, config: EngineConfig) -> WindlassEngine:
        engine = WindlassEngine(config, open_model(config))
        for workload in self._workloads.values():  # warm up
            requests = workload.requests(engine.vocab_size)
            engine.run([Request(request.prompt[:16], 4) for request in requests])
        return engine


def _run(engine: WindlassEngine, workload: Workload, draw: int) -> float:
    engine.reset()
    result = engine.run(workload.requests(engine.vocab_size, draw + 1))
    assert result.window is not None, "all requests of a decode workload decode together"
    return result.window.tok_s


def bits_per_weight(network: Network) -> float:
    """Bits per weight of the decoder's matrices in memory, including scales."""
    num_bytes = weights = 0
    for path, module in network.named_modules():
        if isinstance(module, Linear) and not path.endswith(_HEAD):
            num_bytes += module.gemm_bytes
            num_bytes += module.weight.nbytes if module.weight is not None else 0
            weights += sum(module.parts.values()) * module.num_in
    return 8 * num_bytes / weights


def weight_kernels(network: Network) -> list[str]:
    """Forms and kernels of the decoder's quantised matrices."""
    gemms = (gemm for m in network.modules() if isinstance(m, Linear) for gemm in m.gemms)
    return list(dict.fromkeys(f"{gemm.form}, {gemm.kernel} kernel" for gemm in gemms))


def is_unpacked(network: Network) -> bool:
    """Whether every GEMM uses torch, so that float32 arithmetic gives the same results."""
    layers = [module for module in network.modules() if isinstance(module, Linear)]
    return all(gemm.kernel == "torch" for layer in layers for gemm in layer.gemms)
