"""`windlass train-draft` from the model's files to a folder that `serve --hparams-model` loads."""

from __future__ import annotations

import gc
import hashlib
import platform
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from windlass.build import OpenModel, build_engine, build_scorer, open_model
from windlass.config import EngineConfig
from windlass.engine import Engine
from windlass.errors import ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.fingerprint import fingerprint
from windlass.runner.assemble import Loaded
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoringLimits
from windlass.tools.resumable import check_output
from windlass.tools.train_draft.acceptance import Acceptance, measure
from windlass.tools.train_draft.eagle import EagleHead, draft_vocabulary
from windlass.tools.train_draft.head import Head
from windlass.tools.train_draft.ledger import Ledger
from windlass.tools.train_draft.medusa import MedusaHead
from windlass.tools.train_draft.prompts import Inventor, Prompts, Renderer, read_prompts
from windlass.tools.train_draft.target import Target, aux_layers
from windlass.tools.train_draft.training import Course, Trainer, Watch
from windlass.tools.train_draft.wishes import DEFAULT_PROMPTS, Order
from windlass.tools.train_draft.work import Work
from windlass.tools.train_draft.writing import (
    HELD_OUT,
    TEMPERATURE,
    WINDOW,
    Advance,
    Corpus,
    answer,
    invent,
)

Log = Callable[[str], None]

_SEQS_ON_CUDA = WINDOW  # recorded steps for all that are written at once
_MOST_ROWS = 512  # texts of one step of the target
_SHORTEST_ANSWER = 3  # tokens; a guess and its check need as many
_UNCHANGING = ("time_limit", "save_every")  # of the wishes: what need not be the same to go on


@dataclass(frozen=True, slots=True)
class Made:
    """A finished head: what its report says, and how good it is."""

    report: dict[str, Any]
    acceptance: Acceptance


def run(order: Order, log: Log, advance: Advance, watch: Watch) -> Made:
    """Write the texts, train and measure, or go on with it; returns what report.json says."""
    check_output(order.output)
    wishes = order.wishes
    opened = open_model(order.config)
    hparams = opened.hparams
    if wishes.context > hparams.max_positions:
        raise ConfigError(
            f"--context {wishes.context} is more than the model's {hparams.max_positions} positions."
        )
    wishes.draft_vocab_of(hparams.vocab_size)
    if wishes.kind == "eagle":
        aux_layers(hparams)
    renderer = Renderer(opened.card)
    prompts = None
    if order.data is not None:
        longest = wishes.context - min(wishes.max_tokens, wishes.context // 2)
        prompts = read_prompts(order.data, renderer, longest, wishes.skip_broken)
        for note in prompts.notes:
            log(f"{order.data}: {note}")
    model = fingerprint(hparams, open_checkpoint(opened.files, order.config.model))
    about = _about(order, model, prompts)
    with closing(Work(order.output, about)) as work:
        studio = _Studio(order, opened, model)
        corpus = studio.corpus(work, renderer, prompts, advance)
        log(
            f"texts: {len(corpus.train)} to train on, {corpus.num_tokens:,} tokens, of which "
            f"{corpus.num_answered:,} are answers; {len(corpus.held_out)} held out"
        )
        return _train(order, studio, corpus, work, log, advance, watch)


def _train(
    order: Order,
    studio: _Studio,
    corpus: Corpus,
    work: Work,
    log: Log,
    advance: Advance,
    watch: Watch,
) -> Made:
    wishes, seed = order.wishes, order.config.model.seed
    target = studio.target()
    head = _head(order, target, corpus)
    trainer = Trainer(head, target, corpus.train, wishes, seed)
    began = time.monotonic()
    trainer.prepare(work, log, advance)
    prepared = time.monotonic() - began
    course = trainer.run(work, watch)
    log(f"trained {course.step} steps in {course.seconds:.0f} s; ended by {course.ended}")
    tokens = wishes.batch_tokens_on(target.device.type)
    acceptance = measure(head, target, corpus.held_out, tokens)
    report = _report(order, corpus, course, acceptance)
    report["seconds"] = {
        "writing": round(studio.seconds, 1),
        "states": round(prepared, 1),
        "training": round(course.seconds, 1),
        "all of this run": round(studio.seconds + time.monotonic() - began, 1),
    }
    config = head.config() | {
        "windlass": {
            "target_fingerprint": studio.fingerprint,
            "target": studio.opened.card.name,
            **acceptance.as_dict(),
        }
    }
    work.finish(head.tensors(), config, report)
    return Made(report, acceptance)


def _head(order: Order, target: Target, corpus: Corpus) -> Head:
    wishes, vocab_size = order.wishes, target.hparams.vocab_size
    size = wishes.draft_vocab_of(vocab_size)
    if wishes.kind == "eagle":
        draft_ids = draft_vocabulary(corpus.train, size)
        return EagleHead(target, draft_ids, wishes.num_draft_tokens, order.config.model.seed)
    # The public layout has no map: it comes only with a part of the vocabulary.
    some = draft_vocabulary(corpus.train, size) if size < vocab_size else None
    return MedusaHead(target, wishes.num_draft_tokens, wishes.shares_head, some, wishes.blocks or 1)


class _Studio:
    """Owns the target's weights: first an engine writes with them, then a head learns from them."""

    def __init__(self, order: Order, opened: OpenModel, model: str) -> None:
        self.opened = opened
        self.fingerprint = model
        self.seconds = 0.0  # spent on writing
        self._order = order
        self._weights: Loaded | None = None
        self._engine: Engine | None = None
        wish = order.wishes
        self._config = replace(
            order.config, model=replace(order.config.model, max_model_len=wish.context)
        )
        self._device = choose_device(order.config.model).type

    def corpus(
        self, work: Work, renderer: Renderer, given: Prompts | None, advance: Advance
    ) -> Corpus:
        """Prompts and answers, as far as they are not written yet."""
        began = time.monotonic()
        wishes, seed = self._order.wishes, self._order.config.model.seed
        path = self._order.texts or work.folder / "texts.jsonl"
        if given is None:
            longest = wishes.context // 2
            inventor = Inventor.of(renderer, self.opened.hparams.bos_id, longest, seed)
            about = {**self._arithmetic(), "seed": seed, "longest": longest}
            with closing(Ledger(path.with_suffix(".prompts.jsonl"), about)) as ledger:
                count = wishes.prompts or DEFAULT_PROMPTS
                prompts = invent(self._running, inventor, count, ledger, advance)
        else:
            prompts = given.tokens[: wishes.prompts]
        about = {
            **self._arithmetic(),
            "seed": seed,
            "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
            "max_tokens": wishes.max_tokens,
            "context": wishes.context,
            "temperature": TEMPERATURE,
            "held_out": HELD_OUT,
        }
        with closing(Ledger(path, about)) as ledger:
            sizes = (wishes.max_tokens, wishes.context, seed)
            written = answer(self._running, prompts, ledger, *sizes, advance)
        self._release()
        self.seconds = time.monotonic() - began
        return _long_enough(written)

    def _arithmetic(self) -> dict[str, Any]:
        """What decides the model's words, beside the prompt."""
        model = self._order.config.model
        names = ("dtype", "quantization", "quantize_head")
        return {
            "model": self.fingerprint,
            "device": self._device,
            **{name: getattr(model, name) for name in names},
        }

    def _running(self) -> Engine:
        """The engine that writes, with pages for as many texts as run at once."""
        if self._engine is None:
            config = self._config
            seqs = config.scheduler.max_num_seqs
            if seqs is None:
                seqs = (
                    _SEQS_ON_CUDA if self._device == "cuda" else config.limits("cpu").max_num_seqs
                )
            blocks = seqs * -(-self._order.wishes.context // config.cache.block_size)
            config = replace(
                config,
                scheduler=replace(config.scheduler, max_num_seqs=seqs),
                cache=replace(config.cache, num_blocks=blocks),
            )
            built = build_engine(config, self.opened.source)
            self._weights, self._engine = built.weights, built.engine
        return self._engine

    def _release(self) -> None:
        """Give back the engine's pages; the weights stay."""
        self._engine = None
        gc.unfreeze()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def target(self) -> Target:
        """The same weights, for whole texts."""
        wishes, hparams = self._order.wishes, self.opened.hparams
        tokens = wishes.batch_tokens_on(self._device)
        limits = ScoringLimits(wishes.context, tokens, min(_MOST_ROWS, tokens // 16))
        built = build_scorer(self._config, self.opened.source, limits, self._weights)
        layers = aux_layers(hparams) if wishes.kind == "eagle" else ()
        return Target(built.scorer, hparams, layers)


def _long_enough(corpus: Corpus) -> Corpus:
    """Only texts whose answers have a token to guess and one to check it with."""
    train, held_out = (
        [text for text in texts if len(text.tokens) - text.start >= _SHORTEST_ANSWER]
        for texts in (corpus.train, corpus.held_out)
    )
    if not train or not held_out:
        raise ConfigError(
            f"the model's answers are too short: {len(train)} of {len(corpus.train)} texts to train "
            f"on and {len(held_out)} of {len(corpus.held_out)} held-out ones have "
            f"{_SHORTEST_ANSWER} tokens or more. Give more prompts, or other ones."
        )
    return Corpus(train, held_out)


def _about(order: Order, model: str, prompts: Prompts | None) -> dict[str, Any]:
    """All that the result depends on, under the names of the flags where there are such."""
    wishes = {name: v for name, v in asdict(order.wishes).items() if name not in _UNCHANGING}
    config: EngineConfig = order.config
    return {
        **wishes,
        "model": model,
        "data": prompts.sha256 if prompts else None,
        "seed": config.model.seed,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "device": choose_device(config.model).type,
        "windlass": _version("windlass"),
    }


def _report(order: Order, corpus: Corpus, course: Course, acceptance: Acceptance) -> dict[str, Any]:
    wishes = order.wishes
    shown = {name: value for name, value in asdict(wishes).items() if value is not None}
    return {
        "kind": wishes.kind,
        "held_out": acceptance.as_dict(),
        "options": shown | {"seed": order.config.model.seed},
        "data": order.data.name if order.data else "invented by the model",
        "texts": {
            "train": len(corpus.train),
            "tokens": corpus.num_tokens,
            "answer_tokens": corpus.num_answered,
            "held_out": len(corpus.held_out),
        },
        "training": {
            "steps": course.step,
            "tokens": course.tokens,
            "tokens_per_second": round(course.tokens / max(1e-9, course.seconds), 1),
            "ended_by": course.ended,
            "curve": course.curve,
        },
        "versions": {
            "windlass": _version("windlass"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _version(package: str) -> str:
    """A checkout that was never installed has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
