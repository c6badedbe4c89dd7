"""One model beside the float32 model: what its text costs in quality, and its speed in turns.

Speeds of a shared CPU drift within minutes, so that each run of a format is followed by one of the
reference: the ratio of the two holds even when neither figure does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from windlass.build import BuiltScorer, OpenModel, build_scorer, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.layers.linear import Linear
from windlass.models.network import Network
from windlass.runner.assemble import Loaded
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoredChunk, ScoringLimits
from windlass.tools.bench.speculation import TEXTS
from windlass.tools.bench.throughput import Own
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find
from windlass.tools.eval.data import Corpus, Document
from windlass.tools.eval.metrics import Quality, Tally, compare
from windlass.tools.eval.windows import Cut, cut_corpus

# Reference logits up to so many bytes are kept; more are computed again for every model.
_KEPT_BYTES = 2**32
_HEAD = "lm_head"
_SHORT = "eight short texts that ship with the program"


def short_corpus() -> Corpus:
    """For a first look at quality; a corpus of one's own says more."""
    return Corpus(_SHORT, [Document(_SHORT, "\n\n".join(TEXTS))], running=True)


@dataclass(frozen=True, slots=True)
class Speed:
    """Decode tokens a second, and the ratio to the reference's in the same minute."""

    tok_s: float
    ratio: float


class Judge:
    """Owns the reference's scorer and the text."""

    def __init__(
        self,
        reference: EngineConfig,
        opened: OpenModel,
        corpus: Corpus,
        cut: Cut,
        weights: Loaded | None = None,
    ) -> None:
        """`weights`: the reference's, where they are loaded already."""
        self._config = reference
        self._corpus = corpus
        self._cut = cut
        self._labelled = cut_corpus(corpus, opened.card, cut)
        self._windows = [item.window for item in self._labelled]
        steps = reference.limits(choose_device(reference.model).type)
        longest = max(len(window.tokens) for window in self._windows)
        self._limits = ScoringLimits(longest, steps.max_num_batched_tokens, steps.max_num_seqs)
        if longest > opened.hparams.max_positions:
            raise ConfigError(
                f"a window of {longest} tokens is more than the {opened.hparams.max_positions} "
                f"positions of {opened.card.name}. Use a smaller --context."
            )
        self._reference = build_scorer(reference, opened.source, self._limits, weights)
        self._kept: list[ScoredChunk] | None = None

    @property
    def reference(self) -> BuiltScorer:
        return self._reference

    def build(self, config: EngineConfig, weights: Loaded | None = None) -> BuiltScorer:
        """A model to be judged, which must cut the text as the reference does."""
        if (config.model, config.cache) == (self._config.model, self._config.cache):
            return self._reference
        opened = open_model(config)
        if cut_corpus(self._corpus, opened.card, self._cut) != self._labelled:
            raise ConfigError(
                f"{opened.card.name} cuts the text into other tokens than the reference."
            )
        return build_scorer(config, opened.source, self._limits, weights)

    def alone(self) -> Quality:
        """The reference's own perplexity."""
        tally = Tally()
        for piece in self._pieces():
            targets = self._targets(piece)
            if targets:
                tally.add(compare(piece.values[: len(targets)], targets, None))
        return tally.quality()

    def compare(self, built: BuiltScorer) -> Quality:
        """A model's figures against the reference."""
        tally = Tally()
        for own, other in self._pairs(built):
            targets = self._targets(own)
            if targets:
                count = len(targets)
                tally.add(compare(own.values[:count], targets, other.values[:count]))
        return tally.quality()

    def _pairs(self, built: BuiltScorer) -> Iterator[tuple[ScoredChunk, ScoredChunk]]:
        if built is self._reference:
            return ((piece, piece) for piece in self._pieces())
        return zip(built.scorer.logits(self._windows), self._pieces(), strict=True)

    def _pieces(self) -> Iterator[ScoredChunk]:
        scorer = self._reference.scorer
        positions = sum(len(window.tokens) - window.first for window in self._windows)
        if positions * scorer.vocab_size * 4 > _KEPT_BYTES:
            return scorer.logits(self._windows)
        if self._kept is None:
            self._kept = list(scorer.logits(self._windows))
        return iter(self._kept)

    def _targets(self, piece: ScoredChunk) -> list[int]:
        """The tokens that follow a piece's positions; after a window's last there is none."""
        tokens = self._windows[piece.window].tokens
        return list(tokens[piece.start + 1 : piece.start + 1 + len(piece.values)])


class Race:
    """Owns the reference's engine, against which others run in turns."""

    def __init__(self, reference: EngineConfig, repeat: int, sizes: Sizes) -> None:
        self._workloads = {rows: find(f"decode_b{rows}", sizes) for rows in (1, 8)}
        self._repeat = repeat
        self._reference = self._engine(reference)

    def alone(self) -> dict[int, Speed]:
        return {
            rows: Speed(median(_run(self._reference, work, i) for i in range(self._repeat)), 1.0)
            for rows, work in self._workloads.items()
        }

    def against(self, config: EngineConfig) -> dict[int, Speed]:
        """By the number of rows at once."""
        own = self._engine(config)
        speeds = {}
        for rows, work in self._workloads.items():
            pairs = [
                (_run(own, work, i), _run(self._reference, work, i)) for i in range(self._repeat)
            ]
            ratio = median(mine / other for mine, other in pairs)
            speeds[rows] = Speed(median(mine for mine, _ in pairs), ratio)
        return speeds

    def _engine(self, config: EngineConfig) -> Own:
        made = Own(config, open_model(config))
        for work in self._workloads.values():
            requests = work.requests(made.vocab_size)
            made.run([Request(request.prompt[:16], 4) for request in requests])
        return made


def _run(engine: Own, work: Workload, draw: int) -> float:
    engine.reset()
    taken = engine.run(work.requests(engine.vocab_size, draw + 1))
    assert taken.window is not None, "all requests of a decode workload decode together"
    return taken.window.tok_s


def bits_a_weight(network: Network) -> float:
    """Of the decoder's matrices as they lie in memory, scales included."""
    num_bytes = weights = 0
    for path, module in network.named_modules():
        if isinstance(module, Linear) and not path.endswith(_HEAD):
            num_bytes += module.gemm_bytes
            num_bytes += module.weight.nbytes if module.weight is not None else 0
            weights += sum(module.parts.values()) * module.num_in
    return 8 * num_bytes / weights


def held_as(network: Network) -> list[str]:
    """The forms and kernels of the decoder's quantised matrices."""
    gemm = (p for m in network.modules() if isinstance(m, Linear) for p in m.gemm)
    return list(dict.fromkeys(f"{product.form}, {product.kernel} kernel" for product in gemm))


def is_unpacked(network: Network) -> bool:
    """Whether every product is torch's own, so that float32 arithmetic gives the same."""
    layers = [module for module in network.modules() if isinstance(module, Linear)]
    return all(product.kernel == "torch" for layer in layers for product in layer.gemm)
