"""The training loop: AdamW with warm-up and cosine decay, and regular checkpoints.

The order of the texts depends only on the seed and the epoch, and nothing else is random: a run
resumed from a checkpoint ends with the weights of an uninterrupted run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from windlass.errors import EngineError
from windlass.tools.train_draft.batches import Batch, epoch, make_batch
from windlass.tools.train_draft.corpus import OnProgress, Text
from windlass.tools.train_draft.cuda_graphs import CapturedSteps
from windlass.tools.train_draft.head import Head, StepMetrics
from windlass.tools.train_draft.options import TrainOptions
from windlass.tools.train_draft.output import SavedState, TrainingOutput
from windlass.tools.train_draft.states import CachedStates, StatesSource, memory_need, should_cache
from windlass.tools.train_draft.target import Target

_WARM_UP = 0.05  # share of the training
_MIN_RATE = 0.02  # factor of the learning rate at the end
_BETAS = (0.9, 0.95)
_CLIP = 1.0
_CURVE_POINTS = 50  # in the report
_REPORT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class StepReport:
    """The state of the training; `share` is done by steps or by time, whichever ends it first."""

    step: int
    total: int
    share: float
    loss: float
    accuracy: float  # of the first draft token
    tokens_per_s: float


OnStep = Callable[[StepReport], None]


@dataclass(slots=True)
class TrainingProgress:
    """The progress of a training; saved with its state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    ended: str = ""  # the limit that ended it; empty: still running
    remembered: bool | None = None  # whether the target's states are cached; None: not decided yet


class Trainer:
    """Owns the optimiser and the progress. Call `prepare`, then `run`."""

    def __init__(
        self, head: Head, target: Target, texts: list[Text], *, options: TrainOptions, seed: int
    ) -> None:
        self._head = head
        self._target = target
        self._texts = texts
        self._options = options
        self._seed = seed
        self._named = dict(head.module.named_parameters())
        self._batch_tokens = options.batch_tokens_on(target.device.type)
        on_cuda = target.device.type == "cuda"
        # On the device, so that a captured step reads the current value.
        self._rate = torch.tensor(options.lr, device=target.device) if on_cuda else options.lr
        self._optimiser = torch.optim.AdamW(
            self._named.values(),
            lr=self._rate,
            betas=_BETAS,
            weight_decay=0.0,
            fused=on_cuda,
            capturable=on_cuda,
        )
        self.progress = TrainingProgress()
        self._source: StatesSource = target
        self._captured: CapturedSteps | None = None  # on CUDA, with cached states
        self._steps_per_epoch = sum(
            1 for _ in epoch(texts, self._batch_tokens, seed=seed, number=0)
        )
        steps = self._steps_per_epoch * options.epochs
        self.total = min(steps, options.max_steps or steps)

    def prepare(
        self, output: TrainingOutput, log: Callable[[str], None], on_progress: OnProgress
    ) -> None:
        """Resume from a saved state, and cache the target's states if they are reused."""
        saved = output.load_state()
        if saved is not None:
            self._restore(saved)
        progress = self.progress
        if progress.ended:
            return
        needed, allowed = memory_need(self._target, self._texts)
        reused = self.total > self._steps_per_epoch
        progress.remembered, line = should_cache(needed, allowed, reused, progress.remembered)
        log(line)
        if progress.remembered:
            self._source = CachedStates(
                self._target, self._texts, batch_tokens=self._batch_tokens, on_progress=on_progress
            )
            if self._target.device.type == "cuda":
                self._captured = CapturedSteps(self._update, self._batch_tokens)

    def run(self, output: TrainingOutput, on_step: OnStep) -> TrainingProgress:
        """Train until the step or time limit."""
        progress, began = self.progress, time.monotonic() - self.progress.seconds
        recent = _Recent(self._head.num_draft_tokens, self._target.device)
        for texts in () if progress.ended else self._steps_left():
            progress.ended = self._end()
            if progress.ended:
                break
            recent.add(self._step(texts))
            progress.step += 1
            progress.tokens += sum(len(text.tokens) for text in texts)
            progress.seconds = time.monotonic() - began
            if progress.step % max(1, self.total // _CURVE_POINTS) == 0:
                progress.curve.append(recent.point(progress.step))
            recent.report(self, on_step)
            if progress.step % self._options.save_every == 0:
                output.save_state(self._state(), asdict(progress))
        progress.ended = progress.ended or self._end() or f"--epochs {self._options.epochs}"
        if recent.count:
            progress.curve.append(recent.point(progress.step))
        output.save_state(self._state(), asdict(progress))
        return progress

    def _steps_left(self) -> Iterator[list[Text]]:
        done = self.progress.step
        for number in range(self._options.epochs):
            steps = list(epoch(self._texts, self._batch_tokens, seed=self._seed, number=number))
            yield from steps[min(done, len(steps)) :]
            done -= min(done, len(steps))

    def _end(self) -> str:
        limit = self._options.time_limit
        if self._options.max_steps is not None and self.progress.step >= self._options.max_steps:
            return f"--max-steps {self._options.max_steps}"
        if limit is not None and self.progress.seconds >= limit:
            return f"--time-limit {limit:g}"
        return ""

    @property
    def share(self) -> float:
        """The done share of the training, by steps or by time."""
        by_steps = self.progress.step / max(1, self.total)
        limit = self._options.time_limit
        by_time = self.progress.seconds / limit if limit is not None else 0.0
        return min(1.0, max(by_steps, by_time))

    def _step(self, texts: list[Text]) -> StepMetrics:
        self._set_rate(self._options.lr * schedule(self.share))
        offsets = self._source.offsets(texts)
        if self._captured is not None:
            return self._captured.run(texts, offsets)
        return self._update(make_batch(texts, offsets, self._target.device))

    def _set_rate(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    def _update(self, batch: Batch) -> StepMetrics:
        """Learn from a batch. Batches of one shape differ only in their tensors."""
        metrics = self._head.backward(batch, self._source.states(batch))
        clip_grad_norm_(self._named.values(), _CLIP)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return metrics

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"module.{name}": value for name, value in self._named.items()}
        for name, parameter in self._named.items():
            for key, value in self._optimiser.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def _restore(self, saved: SavedState) -> None:
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(saved.tensors[f"module.{name}"])
                # The fused optimiser needs the step count beside the moments, on the device.
                self._optimiser.state[parameter] = {
                    key: saved.tensors[f"{key}.{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.progress = TrainingProgress(**saved.about)


class _Recent:
    """Sums of the metrics since the last curve point, on the device: reading them synchronises."""

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self.count = 0
        self._loss = torch.zeros((), device=device)
        self._accuracy = torch.zeros(num_draft_tokens, device=device)
        self._reported_at: float | None = None

    def add(self, metrics: StepMetrics) -> None:
        self.count += 1
        self._loss += metrics.loss
        self._accuracy += metrics.accuracy

    def point(self, step: int) -> dict[str, float]:
        """Return the means since the last point, and reset them."""
        loss, accuracy = self._means(step)
        self.count = 0
        self._loss.zero_()
        self._accuracy.zero_()
        return {"step": step, "loss": loss, "accuracy": accuracy}

    def _means(self, step: int) -> tuple[float, float]:
        loss = self._loss.item() / max(1, self.count)
        if not math.isfinite(loss):
            raise EngineError(
                f"the training loss is {loss} at step {step}: the training diverged. Lower --lr; "
                "earlier saved states are kept."
            )
        return round(loss, 4), round(self._accuracy[0].item() / max(1, self.count), 4)

    def report(self, trainer: Trainer, on_step: OnStep) -> None:
        """Report the progress at most twice per second."""
        now, progress = time.monotonic(), trainer.progress
        if self._reported_at is not None and now - self._reported_at < _REPORT_EVERY_S:
            return
        self._reported_at = now
        if self.count:
            loss, accuracy = self._means(progress.step)
        else:
            loss, accuracy = progress.curve[-1]["loss"], progress.curve[-1]["accuracy"]
        rate = progress.tokens / max(1e-9, progress.seconds)
        on_step(
            StepReport(
                step=progress.step,
                total=trainer.total,
                share=trainer.share,
                loss=loss,
                accuracy=accuracy,
                tokens_per_s=rate,
            )
        )


def schedule(share: float) -> float:
    """The factor of the learning rate: linear warm-up, then cosine decay."""
    if share < _WARM_UP:
        return (share + 0.01) / (_WARM_UP + 0.01)
    decayed = (share - _WARM_UP) / (1 - _WARM_UP)
    return _MIN_RATE + (1 - _MIN_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, decayed)))
