"""Measures a model, alone or beside a reference: both are run window by window, side by side."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from windlass.build import BuiltScorer, OpenModel, build_scorer, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.device import choose_device
from windlass.runner.scoring import Piece, Scorer, ScoringLimits
from windlass.tools.bench.record import Record
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
    own = open_model(config)
    other = open_model(reference) if reference is not None else None
    windows = cut_corpus(corpus, own.card, cut)
    _check_context(cut, config, own)
    if other is not None and reference is not None:
        _check_context(cut, reference, other)
        if cut_corpus(corpus, other.card, cut) != windows:
            raise ConfigError(
                f"{own.card.name} and {other.card.name} cut the text into different tokens, so they "
                "cannot be compared token by token. Take a reference with the same tokenizer."
            )
    limits = _limits(config, windows)
    first = build_scorer(config, own.source, limits)
    second = None
    if other is not None and reference is not None:
        shared = first.weights if reference.model == config.model else None
        second = build_scorer(reference, other.source, limits, shared)
    start = time.perf_counter()
    tallies, done = _score(first.scorer, second.scorer if second else None, windows, watch)
    seconds = time.perf_counter() - start
    overall = tallies.pop(ALL).quality()
    labels = {name: tally.quality() for name, tally in tallies.items()} if corpus.labelled else {}
    rows = [overall.row(ALL), *(quality.row(name) for name, quality in labels.items())]
    settings = {
        "data": corpus.name,
        **{field.name: getattr(cut, field.name) for field in fields(cut)},
        "windows": len(windows),
        "windows_done": done,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(len(w.window.tokens) for w in windows[:done]) / seconds, 1),
        "model": _about(config, own, first),
    }
    if other is not None and reference is not None and second is not None:
        settings["reference"] = _about(reference, other, second)
    notes = cut.describe() + "."
    if done < len(windows):
        notes += f" Interrupted: {done} of {len(windows)} windows were measured."
    record = Record("perplexity" if reference is None else "quality", rows, notes, settings)
    return Outcome(overall, labels, done, len(windows), seconds, record)


def _score(
    own: Scorer, other: Scorer | None, windows: list[LabelledWindow], watch: Watch
) -> tuple[dict[str, Tally], int]:
    """Tallies by label, and of all; and how many windows are in them whole."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    total = tallies[ALL]
    done = 0
    try:
        for piece, reference in _lockstep(own, other, windows):
            tokens = windows[piece.window].window.tokens
            targets = tokens[piece.start + 1 : piece.start + 1 + len(piece.values)]
            count = len(targets)  # nothing follows the last position
            if count:
                others = reference.values[:count] if reference is not None else None
                figures = compare(piece.values[:count], targets, others)
                tallies[windows[piece.window].label].add(figures)
                total.add(figures)
            if piece.start + len(piece.values) == len(tokens):
                done = piece.window + 1
                watch(done, len(windows), total)
    except KeyboardInterrupt:
        if not total.num_tokens:
            raise
    return dict(tallies), done


def _lockstep(
    own: Scorer, other: Scorer | None, windows: list[LabelledWindow]
) -> Iterator[tuple[Piece, Piece | None]]:
    """The same positions of both; over the tokens that both vocabularies have."""
    inputs = [item.window for item in windows]
    if other is None:
        yield from ((piece, None) for piece in own.logits(inputs))
        return
    common = min(own.vocab_size, other.vocab_size)
    yield from zip(own.logits(inputs, common), other.logits(inputs, common), strict=True)


def _limits(config: EngineConfig, windows: list[LabelledWindow]) -> ScoringLimits:
    steps = config.limits(choose_device(config.model).type)
    longest = max(len(item.window.tokens) for item in windows)
    return ScoringLimits(longest, steps.max_num_batched_tokens, steps.max_num_seqs)


def _check_context(cut: Cut, config: EngineConfig, model: OpenModel) -> None:
    wish = config.model.max_model_len
    longest = wish if wish is not None and wish > 0 else model.spec.max_positions
    if cut.context > longest:
        raise ConfigError(
            f"--context {cut.context} is more than the {longest} positions of {model.card.name}. "
            f"Use {longest} or less."
        )


def _about(config: EngineConfig, model: OpenModel, built: BuiltScorer) -> dict[str, Any]:
    return {
        "name": model.card.name,
        "options": changed(config),
        "weight_bytes": built.weights.weight_bytes,
        "choices": {choice.what: choice.value for choice in built.choices},
    }


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
