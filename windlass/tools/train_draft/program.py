"""`windlass train-draft`: from the model's files to a folder that `serve --spec-model` loads."""

from __future__ import annotations

import gc
import hashlib
import platform
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from windlass.build import OpenModel, build_engine, open_model
from windlass.build_scorer import build_scorer
from windlass.config import EngineConfig
from windlass.engine import Engine
from windlass.errors import ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.fingerprint import fingerprint
from windlass.models.network import block_size_of
from windlass.runner.device import choose_device
from windlass.runner.load import Loaded
from windlass.runner.scoring import ScoringLimits
from windlass.tools.resumable import check_output
from windlass.tools.train_draft.acceptance import Acceptance, measure
from windlass.tools.train_draft.corpus import (
    HELD_OUT,
    TEMPERATURE,
    WINDOW,
    Corpus,
    OnProgress,
    generate_answers,
    generate_prompts,
)
from windlass.tools.train_draft.eagle import EagleHead, draft_vocabulary
from windlass.tools.train_draft.head import Head, saved_tensors
from windlass.tools.train_draft.medusa import MedusaHead
from windlass.tools.train_draft.options import DEFAULT_PROMPTS, TrainJob
from windlass.tools.train_draft.output import TrainingOutput
from windlass.tools.train_draft.prompts import PromptGenerator, Prompts, Renderer, read_prompts
from windlass.tools.train_draft.target import Target, aux_layers
from windlass.tools.train_draft.token_log import TokenLog
from windlass.tools.train_draft.training import OnStep, Trainer, TrainingProgress
from windlass.version import __version__

Log = Callable[[str], None]

_SEQS_ON_CUDA = WINDOW  # capture graphs for all concurrent requests
_MAX_ROWS = 512  # texts per step of the target
_MIN_ANSWER = 3  # tokens: a draft token and its verification need as many
_MAY_CHANGE = ("time_limit", "save_every")  # options that may differ when a run resumes


@dataclass(frozen=True, slots=True)
class TrainedHead:
    report: dict[str, Any]
    acceptance: Acceptance


def run(job: TrainJob, log: Log, *, on_progress: OnProgress, on_step: OnStep) -> TrainedHead:
    """Generate the texts, train and measure, or resume; returns the contents of report.json."""
    check_output(job.output)
    options = job.options
    opened = open_model(job.config)
    hparams = opened.hparams
    if options.context > hparams.max_positions:
        raise ConfigError(
            f"--context {options.context} is more than the model's {hparams.max_positions} positions."
        )
    options.draft_vocab_of(hparams.vocab_size)
    if options.kind == "eagle":
        aux_layers(hparams)
    renderer = Renderer(opened.card)
    prompts = None
    if job.data is not None:
        max_prompt = options.context - min(options.max_tokens, options.context // 2)
        prompts = read_prompts(
            job.data, renderer, max_prompt, skip_bad_lines=options.skip_bad_lines
        )
        for note in prompts.notes:
            log(f"{job.data}: {note}")
    model = fingerprint(hparams, open_checkpoint(opened.files, job.config.model))
    about = _about(job, model, prompts)
    with closing(TrainingOutput(job.output, about)) as output:
        session = _TargetSession(job, opened, model)
        corpus = session.corpus(output, renderer, prompts, on_progress=on_progress)
        log(
            f"texts: {len(corpus.train)} to train on, {corpus.num_tokens:,} tokens, of which "
            f"{corpus.num_answered:,} are answers; {len(corpus.held_out)} held out"
        )
        return _train(
            job,
            session=session,
            corpus=corpus,
            output=output,
            log=log,
            on_progress=on_progress,
            on_step=on_step,
        )


def _train(
    job: TrainJob,
    *,
    session: _TargetSession,
    corpus: Corpus,
    output: TrainingOutput,
    log: Log,
    on_progress: OnProgress,
    on_step: OnStep,
) -> TrainedHead:
    options, seed = job.options, job.config.model.seed
    target = session.target()
    head = _head(job, target, corpus)
    trainer = Trainer(head, target, corpus.train, options=options, seed=seed)
    began = time.monotonic()
    trainer.prepare(output, log, on_progress)
    prepared = time.monotonic() - began
    progress = trainer.run(output, on_step)
    log(f"trained {progress.step} steps in {progress.seconds:.0f} s; ended by {progress.ended}")
    tokens = options.batch_tokens_on(target.device.type)
    acceptance = measure(head, target, corpus.held_out, tokens)
    report = _report(job, corpus=corpus, progress=progress, acceptance=acceptance)
    report["seconds"] = {
        "writing": round(session.seconds, 1),
        "states": round(prepared, 1),
        "training": round(progress.seconds, 1),
        "all of this run": round(session.seconds + time.monotonic() - began, 1),
    }
    config = head.config() | {
        "windlass": {
            "target_fingerprint": session.fingerprint,
            "target": session.opened.card.name,
            **acceptance.as_dict(),
        }
    }
    output.finish(saved_tensors(head.module), config, report)
    return TrainedHead(report, acceptance)


def _head(job: TrainJob, target: Target, corpus: Corpus) -> Head:
    options, vocab_size = job.options, target.hparams.vocab_size
    size = options.draft_vocab_of(vocab_size)
    if options.kind == "eagle":
        return EagleHead(
            target,
            draft_ids=draft_vocabulary(corpus.train, size),
            num_draft_tokens=options.num_draft_tokens,
            seed=job.config.model.seed,
        )
    # The public layout has no d2t: only a reduced vocabulary needs it.
    draft_ids = draft_vocabulary(corpus.train, size) if size < vocab_size else None
    return MedusaHead(
        target,
        num_heads=options.num_draft_tokens,
        share=options.shares_head,
        draft_ids=draft_ids,
        num_blocks=options.blocks or 1,
    )


class _TargetSession:
    """Owns the target's weights: first an engine generates texts, then a head learns from them."""

    def __init__(self, job: TrainJob, opened: OpenModel, model: str) -> None:
        self.opened = opened
        self.fingerprint = model
        self.seconds = 0.0  # spent on generating texts
        self._job = job
        self._weights: Loaded | None = None
        self._engine: Engine | None = None
        options = job.options
        self._config = replace(
            job.config, model=replace(job.config.model, max_model_len=options.context)
        )
        self._device = choose_device(job.config.model).type

    def corpus(
        self,
        output: TrainingOutput,
        renderer: Renderer,
        given: Prompts | None,
        *,
        on_progress: OnProgress,
    ) -> Corpus:
        """Generate prompts and answers, except those already in the logs."""
        began = time.monotonic()
        options, seed = self._job.options, self._job.config.model.seed
        path = self._job.texts or output.folder / "texts.jsonl"
        if given is None:
            max_prompt = options.context // 2
            generator = PromptGenerator(
                renderer, bos_id=self.opened.hparams.bos_id, max_tokens=max_prompt, seed=seed
            )
            about = {**self._numerics(), "seed": seed, "longest": max_prompt}
            with closing(TokenLog(path.with_suffix(".prompts.jsonl"), about)) as log:
                count = options.prompts or DEFAULT_PROMPTS
                prompts = generate_prompts(
                    self._running, generator, count, log=log, on_progress=on_progress
                )
        else:
            prompts = given.tokens[: options.prompts]
        about = {
            **self._numerics(),
            "seed": seed,
            "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest()[:16],
            "max_tokens": options.max_tokens,
            "context": options.context,
            "temperature": TEMPERATURE,
            "held_out": HELD_OUT,
        }
        with closing(TokenLog(path, about)) as log:
            corpus = generate_answers(
                self._running,
                prompts,
                log=log,
                max_tokens=options.max_tokens,
                context=options.context,
                seed=seed,
                on_progress=on_progress,
            )
        self._release()
        self.seconds = time.monotonic() - began
        return _long_enough(corpus)

    def _numerics(self) -> dict[str, Any]:
        """The settings that decide the model's output, beside the prompt."""
        model = self._job.config.model
        names = ("dtype", "quantization", "quantize_head")
        return {
            "model": self.fingerprint,
            "device": self._device,
            **{name: getattr(model, name) for name in names},
        }

    def _running(self) -> Engine:
        """The engine that generates texts, with KV blocks for all concurrent requests."""
        if self._engine is None:
            config = self._config
            seqs = config.scheduler.max_num_seqs
            if seqs is None:
                seqs = (
                    _SEQS_ON_CUDA if self._device == "cuda" else config.limits("cpu").max_num_seqs
                )
            size = block_size_of(config.cache.block_size, self.opened.hparams)
            blocks = seqs * -(-self._job.options.context // size)
            config = replace(
                config,
                scheduler=replace(config.scheduler, max_num_seqs=seqs),
                cache=replace(config.cache, num_blocks=blocks),
            )
            built = build_engine(config, self.opened.source)
            self._weights, self._engine = built.weights, built.engine
        return self._engine

    def _release(self) -> None:
        """Free the engine's KV cache; the weights stay."""
        self._engine = None
        gc.unfreeze()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def target(self) -> Target:
        """The target for whole texts, with the same weights."""
        options, hparams = self._job.options, self.opened.hparams
        tokens = options.batch_tokens_on(self._device)
        limits = ScoringLimits(options.context, tokens, min(_MAX_ROWS, tokens // 16))
        built = build_scorer(self._config, self.opened.source, limits=limits, weights=self._weights)
        layers = aux_layers(hparams) if options.kind == "eagle" else ()
        return Target(built.scorer, hparams, layers)


def _long_enough(corpus: Corpus) -> Corpus:
    """Keep texts whose answers are long enough for a draft token and its verification."""
    train, held_out = (
        [text for text in texts if len(text.tokens) - text.start >= _MIN_ANSWER]
        for texts in (corpus.train, corpus.held_out)
    )
    if not train or not held_out:
        raise ConfigError(
            f"the model's answers are too short: {len(train)} of {len(corpus.train)} texts to train "
            f"on and {len(held_out)} of {len(corpus.held_out)} held-out ones have "
            f"{_MIN_ANSWER} tokens or more. Give more or other prompts."
        )
    return Corpus(train, held_out)


def _about(job: TrainJob, model: str, prompts: Prompts | None) -> dict[str, Any]:
    """Everything that the result depends on, by flag name where there is a flag."""
    options = {name: v for name, v in asdict(job.options).items() if name not in _MAY_CHANGE}
    config: EngineConfig = job.config
    return {
        **options,
        "model": model,
        "data": prompts.sha256 if prompts else None,
        "seed": config.model.seed,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "device": choose_device(config.model).type,
        "windlass": __version__,
    }


def _report(
    job: TrainJob, *, corpus: Corpus, progress: TrainingProgress, acceptance: Acceptance
) -> dict[str, Any]:
    options = job.options
    shown = {name: value for name, value in asdict(options).items() if value is not None}
    return {
        "kind": options.kind,
        "held_out": acceptance.as_dict(),
        "options": shown | {"seed": job.config.model.seed},
        "data": job.data.name if job.data else "invented by the model",
        "texts": {
            "train": len(corpus.train),
            "tokens": corpus.num_tokens,
            "answer_tokens": corpus.num_answered,
            "held_out": len(corpus.held_out),
        },
        "training": {
            "steps": progress.step,
            "tokens": progress.tokens,
            "tokens_per_second": round(progress.tokens / max(1e-9, progress.seconds), 1),
            "ended_by": progress.ended,
            "curve": progress.curve,
        },
        "versions": {
            "windlass": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
