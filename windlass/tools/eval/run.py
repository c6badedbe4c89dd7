"""Measures a model, alone or beside a reference: both are run window by window, side by side."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from windlass.build import BuiltScorer, OpenModel, build_scorer, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoredChunk, Scorer, ScoringLimits, Window
from windlass.tools.common.record import Record
from windlass.tools.eval.data import Corpus
from windlass.tools.eval.metrics import Quality, Tally, compare
from windlass.tools.eval.windows import Cut, LabelledWindow, cut_corpus

ALL = "all"

Watch = Callable[[int, int, Tally], None]  # windows done, windows, what was measured so far


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured, over everything and by label."""

    overall: Quality
    labels: dict[str, Quality]
    windows_done: int
    windows: int
    seconds: float
    record: Record

    @property
    def complete(self) -> bool:
        return self.windows_done == self.windows


def measure(
    config: EngineConfig,
    reference: EngineConfig | None,
    corpus: Corpus,
    cut: Cut,
    watch: Watch = lambda *_: None,
) -> Outcome:
    """Score the corpus. Ctrl-C ends it early, with what was measured until then."""
    configs = [config] if reference is None else [config, reference]
    opened = [open_model(each) for each in configs]
    windows = cut_corpus(corpus, opened[0].card, cut)
    _check_tokens(windows, corpus, cut, opened)
    limits = _limits(config, windows)
    for each, model in zip(configs, opened, strict=True):
        _check_context(limits.longest, each, model)
    sides = _build(configs, opened, limits)
    start = time.perf_counter()
    overall, by_label, done = _score([side.built.scorer for side in sides], windows, watch)
    seconds = time.perf_counter() - start
    labels = {}
    if corpus.labelled:
        labels = {name: tally.quality() for name, tally in by_label.items()}
    total = overall.quality()
    num_tokens = sum(len(item.window.tokens) for item in windows[:done])
    settings = {
        "data": corpus.name,
        **asdict(cut),
        "windows": len(windows),
        "windows_done": done,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(num_tokens / seconds, 1),
        **{name: side.about() for name, side in zip(("model", "reference"), sides, strict=False)},
    }
    notes = cut.describe() + "."
    if done < len(windows):
        notes += f" Interrupted: {done} of {len(windows)} windows were measured."
    rows = [total.row(ALL), *(quality.row(name) for name, quality in labels.items())]
    record = Record("perplexity" if reference is None else "quality", rows, notes, settings)
    return Outcome(total, labels, done, len(windows), seconds, record)


@dataclass(frozen=True, slots=True)
class _Side:
    """The model, or its reference."""

    config: EngineConfig
    opened: OpenModel
    built: BuiltScorer

    def about(self) -> dict[str, Any]:
        return {
            "name": self.opened.card.name,
            "options": changed(self.config),
            "weight_bytes": self.built.weights.weight_bytes,
            "choices": {choice.what: choice.value for choice in self.built.choices},
        }


def _check_context(longest: int, config: EngineConfig, model: OpenModel) -> None:
    wish = config.model.max_model_len
    most = wish if wish is not None and wish > 0 else model.hparams.max_positions
    if longest > most:
        raise ConfigError(
            f"a window of {longest} tokens is more than the {most} positions of "
            f"{model.card.name}. Use --context {most} or less."
        )


def _check_tokens(
    windows: list[LabelledWindow], corpus: Corpus, cut: Cut, opened: list[OpenModel]
) -> None:
    for other in opened[1:]:
        if cut_corpus(corpus, other.card, cut) != windows:
            raise ConfigError(
                f"{opened[0].card.name} and {other.card.name} cut the text into different tokens, "
                "so they cannot be compared token by token. Take a reference with the same "
                "tokenizer."
            )


def _build(
    configs: list[EngineConfig], opened: list[OpenModel], limits: ScoringLimits
) -> list[_Side]:
    """Load both; a reference that differs only in its cache or scheduler shares the weights."""
    sides: list[_Side] = []
    for config, model in zip(configs, opened, strict=True):
        shared = [side.built.weights for side in sides if side.config.model == config.model]
        built = build_scorer(config, model.source, limits, shared[0] if shared else None)
        sides.append(_Side(config, model, built))
    return sides


def _score(
    scorers: list[Scorer], windows: list[LabelledWindow], watch: Watch
) -> tuple[Tally, dict[str, Tally], int]:
    """What was counted, of all and by label, and how many windows are in it whole."""
    overall, by_label, done = Tally(), defaultdict[str, Tally](Tally), 0
    try:
        for piece, *others in _lockstep(scorers, [item.window for item in windows]):
            item = windows[piece.window]
            tokens, count = item.window.tokens, len(piece.values)
            targets = tokens[piece.start + 1 : piece.start + 1 + count]
            if targets:  # nothing follows the last position
                reference = others[0].values[: len(targets)] if others else None
                figures = compare(piece.values[: len(targets)], targets, reference)
                overall.add(figures)
                by_label[item.label].add(figures)
            if piece.start + count == len(tokens):
                done = piece.window + 1
                watch(done, len(windows), overall)
    except KeyboardInterrupt:
        if not overall.num_tokens:
            raise
    return overall, by_label, done


def _lockstep(scorers: list[Scorer], windows: list[Window]) -> Iterator[tuple[ScoredChunk, ...]]:
    """The same positions of all; over the tokens that all vocabularies have."""
    common = min(scorer.vocab_size for scorer in scorers)
    return zip(*(scorer.logits(windows, common) for scorer in scorers), strict=True)


def _limits(config: EngineConfig, windows: list[LabelledWindow]) -> ScoringLimits:
    steps = config.limits(choose_device(config.model).type)
    longest = max(len(item.window.tokens) for item in windows)
    return ScoringLimits(longest, steps.max_num_batched_tokens, steps.max_num_seqs)


def changed(config: EngineConfig) -> dict[str, Any]:
    """The options that are not at their defaults; secrets left out."""
    default = EngineConfig()
    found = {}
    for section in ("model", "cache", "scheduler"):
        mine, plain = getattr(config, section), getattr(default, section)
        for field in fields(mine):
            value = getattr(mine, field.name)
            if value != getattr(plain, field.name) and field.name != "hf_token":
                found[field.name] = value
    return found
