"""Measures the quality of several models against one reference, on the same text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from windlass.build import OpenModel, open_model
from windlass.build_scorer import BuiltScorer, build_scorer
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.load import Loaded
from windlass.runner.scoring import ScoredChunk
from windlass.tools.eval.data import Corpus
from windlass.tools.eval.metrics import Quality, Tally, compare
from windlass.tools.eval.run import scoring_limits
from windlass.tools.eval.windows import Cut, cut_corpus

# Reference logits up to this size are cached; larger ones are recomputed for every model.
_MAX_CACHED_BYTES = 2**32


class QualityComparison:
    """Owns the reference's scorer and the text."""

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
        self._limits = scoring_limits(reference, self._labelled)
        if self._limits.longest > opened.hparams.max_positions:
            raise ConfigError(
                f"a window of {self._limits.longest} tokens is more than the "
                f"{opened.hparams.max_positions} positions of {opened.card.name}. Use a smaller "
                "--context."
            )
        self.reference = build_scorer(reference, opened.source, self._limits, weights)
        self._cached: list[ScoredChunk] | None = None

    def build(self, config: EngineConfig, weights: Loaded | None = None) -> BuiltScorer:
        """Build the scorer of a model, which must tokenize the text as the reference does."""
        if (config.model, config.cache) == (self._config.model, self._config.cache):
            return self.reference
        opened = open_model(config)
        if cut_corpus(self._corpus, opened.card, self._cut) != self._labelled:
            raise ConfigError(
                f"{opened.card.name} tokenizes the text differently from the reference."
            )
        return build_scorer(config, opened.source, self._limits, weights)

    def reference_quality(self) -> Quality:
        """The reference's own perplexity."""
        return self._quality((chunk, None) for chunk in self._reference_chunks())

    def compare(self, built: BuiltScorer) -> Quality:
        """A model's quality against the reference."""
        if built is self.reference:
            return self._quality((chunk, chunk) for chunk in self._reference_chunks())
        own = built.scorer.logits(self._windows)
        return self._quality(zip(own, self._reference_chunks(), strict=True))

    def _quality(self, pairs: Iterable[tuple[ScoredChunk, ScoredChunk | None]]) -> Quality:
        tally = Tally()
        for own, other in pairs:
            # The last position of a window has no next token.
            first = own.start + 1
            targets = self._windows[own.window].tokens[first : first + len(own.values)]
            if targets:
                count = len(targets)
                reference = None if other is None else other.values[:count]
                tally.add(compare(own.values[:count], targets, reference))
        return tally.quality()

    def _reference_chunks(self) -> Iterator[ScoredChunk]:
        scorer = self.reference.scorer
        positions = sum(len(window.tokens) - window.first for window in self._windows)
        if positions * scorer.vocab_size * 4 > _MAX_CACHED_BYTES:
            return scorer.logits(self._windows)
        if self._cached is None:
            self._cached = list(scorer.logits(self._windows))
        return iter(self._cached)
