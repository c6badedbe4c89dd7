"""Measures the quality of a model, alone or against a reference run window by window with it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from windlass.build import OpenModel, open_model
from windlass.build_scorer import BuiltScorer, build_scorer
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoredChunk, Scorer, ScoringLimits, Window
from windlass.start_log import start_log
from windlass.tools.common.record import Record
from windlass.tools.eval.data import Corpus
from windlass.tools.eval.metrics import Quality, Tally, compare
from windlass.tools.eval.windows import Cut, LabelledWindow, cut_corpus

ALL = "all"

Watch = Callable[[int, int, Tally], None]  # windows done, all windows, figures so far
# Computing the figures reads every token so far, and they change slowly.
_PROGRESS_UPDATES = 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measured quality, overall and by label."""

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
    """Score the corpus. Ctrl-C ends it early, with the figures so far."""
    configs = [config] if reference is None else [config, reference]
    opened = [open_model(each) for each in configs]
    windows = cut_corpus(corpus, opened[0].card, cut)
    _check_tokens(windows, corpus, cut=cut, opened=opened)
    limits = scoring_limits(config, windows)
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
    record = Record(
        name="perplexity" if reference is None else "quality",
        rows=rows,
        notes=notes,
        settings=settings,
    )
    return Outcome(
        overall=total,
        labels=labels,
        windows_done=done,
        windows=len(windows),
        seconds=seconds,
        record=record,
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """The model or its reference."""

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
    length = config.model.max_model_len
    limit = length if length is not None and length > 0 else model.hparams.max_positions
    if longest > limit:
        raise ConfigError(
            f"a window of {longest} tokens is more than the {limit} positions of "
            f"{model.card.name}. Use --context {limit} or less."
        )


def _check_tokens(
    windows: list[LabelledWindow], corpus: Corpus, cut: Cut, opened: list[OpenModel]
) -> None:
    for other in opened[1:]:
        if cut_corpus(corpus, other.card, cut) != windows:
            raise ConfigError(
                f"{opened[0].card.name} and {other.card.name} tokenize the text into different tokens, "
                "so their logits cannot be compared. Use a reference with the same tokenizer."
            )


def _build(
    configs: list[EngineConfig], opened: list[OpenModel], limits: ScoringLimits
) -> list[_Side]:
    """Load both models. They share weights if they differ only in KV cache or scheduler."""
    sides: list[_Side] = []
    for config, model in zip(configs, opened, strict=True):
        shared = [side.built.weights for side in sides if side.config.model == config.model]
        built = build_scorer(
            config, model.source, limits=limits, weights=shared[0] if shared else None
        )
        sides.append(_Side(config, model, built))
    return sides


def _score(
    scorers: list[Scorer], windows: list[LabelledWindow], watch: Watch
) -> tuple[Tally, dict[str, Tally], int]:
    """Return the figures of all tokens and by label, and the number of complete windows."""
    overall, by_label, done = Tally(), defaultdict[str, Tally](Tally), 0
    try:
        for chunk, *others in _lockstep(scorers, [item.window for item in windows]):
            item = windows[chunk.window]
            tokens, count = item.window.tokens, len(chunk.values)
            targets = tokens[chunk.start + 1 : chunk.start + 1 + count]
            if targets:  # the last position has no next token
                reference = others[0].values[: len(targets)] if others else None
                figures = compare(chunk.values[: len(targets)], targets, reference)
                overall.add(figures)
                by_label[item.label].add(figures)
            if chunk.start + count == len(tokens):
                done = chunk.window + 1
                watch(done, len(windows), overall)
    except KeyboardInterrupt:
        if not overall.num_tokens:
            raise
    return overall, by_label, done


def _lockstep(scorers: list[Scorer], windows: list[Window]) -> Iterator[tuple[ScoredChunk, ...]]:
    """Yield the same positions of all models, over the smallest vocabulary."""
    common = min(scorer.vocab_size for scorer in scorers)
    return zip(*(scorer.logits(windows, common) for scorer in scorers), strict=True)


def scoring_limits(config: EngineConfig, windows: list[LabelledWindow]) -> ScoringLimits:
    """Step sizes to score these windows."""
    steps = config.limits(choose_device(config.model).type)
    longest = max(len(item.window.tokens) for item in windows)
    return ScoringLimits(longest, steps.max_num_batched_tokens, steps.max_num_seqs)


def changed(config: EngineConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults, without secrets."""
    default = EngineConfig()
    found = {}
    for section in ("model", "cache", "scheduler"):
        own, defaults = getattr(config, section), getattr(default, section)
        for field in fields(own):
            value = getattr(own, field.name)
            if value != getattr(defaults, field.name) and field.name != "hf_token":
                found[field.name] = value
    return found


@contextmanager
def progress_bar(shown: bool) -> Iterator[Watch]:
    """Show a bar on stderr with the figures so far; yield the callback for `measure`."""
    if not shown:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    progress = Progress(console=Console(stderr=True))
    task = progress.add_task("windows", total=None)

    def watch(done: int, total: int, tally: Tally) -> None:
        if not progress.live.is_started:  # not while models are loaded
            start_log.info("")  # a line of `starting` makes room
            progress.start()
        if done == total or done % max(1, total // _PROGRESS_UPDATES) == 0:
            progress.update(task, completed=done, total=total, description=_figures(tally))

    try:
        yield watch
    finally:
        progress.stop()


def _figures(tally: Tally) -> str:
    quality = tally.quality()
    text = f"perplexity {quality.perplexity:.3f}"
    if quality.against is None:
        return text
    return f"{text}, agreement {quality.against.agreement:.2%}, KL {quality.against.kl_mean:.5f}"
