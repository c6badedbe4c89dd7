"""The training loop: AdamW with a warm-up and a cosine, states saved so that a kill costs little.

The order of the texts is a function of the seed and the epoch, and nothing else is random: a run that
goes on from a saved state ends with the weights of one that was never interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from windlass.errors import EngineError
from windlass.tools.train_draft.batches import Batch, epoch, make_batch
from windlass.tools.train_draft.head import Figures, Head
from windlass.tools.train_draft.recorded import RecordedSteps
from windlass.tools.train_draft.states import Room, Source, decide, remember
from windlass.tools.train_draft.target import Target
from windlass.tools.train_draft.wishes import Wishes
from windlass.tools.train_draft.work import SavedState, Work
from windlass.tools.train_draft.writing import Advance, Text

_WARM_UP = 0.05  # of the training
_LOWEST = 0.02  # of the rate, at the end
_BETAS = (0.9, 0.95)
_CLIP = 1.0
_POINTS = 50  # of the curve in the report
_SHOW_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training is; `share` counts steps or time, whichever ends it first."""

    step: int
    total: int
    share: float
    loss: float
    accuracy: float  # of the first guess
    tokens_per_s: float


Watch = Callable[[Progress], None]


@dataclass(slots=True)
class Course:
    """What a training has behind it; saved with its state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    ended: str = ""  # why; empty: it has not
    remembered: bool | None = None  # the target's states, computed once; None: not decided yet


class Trainer:
    """Owns the optimiser and the course. First `prepare`, then `run`."""

    def __init__(
        self, head: Head, target: Target, texts: list[Text], wishes: Wishes, seed: int
    ) -> None:
        self._head = head
        self._target = target
        self._texts = texts
        self._wishes = wishes
        self._seed = seed
        self._named = dict(head.module.named_parameters())
        self._batch_tokens = wishes.batch_tokens_on(target.device.type)
        on_cuda = target.device.type == "cuda"
        # On the device, so that a recorded step reads what it is by then.
        self._rate = torch.tensor(wishes.lr, device=target.device) if on_cuda else wishes.lr
        self._optimiser = torch.optim.AdamW(
            *(self._named.values(), self._rate, _BETAS),
            weight_decay=0.0,
            fused=on_cuda,
            capturable=on_cuda,
        )
        self.course = Course()
        self._source: Source = target
        self._recorded: RecordedSteps | None = None  # where states are remembered, on CUDA
        self._steps_per_epoch = sum(1 for _ in epoch(texts, self._batch_tokens, seed, 0))
        steps = self._steps_per_epoch * wishes.epochs
        self.total = min(steps, wishes.max_steps or steps)

    def prepare(self, work: Work, log: Callable[[str], None], advance: Advance) -> None:
        """Go on from what `work` has, and compute the target's states where once is enough."""
        saved = work.load_state()
        if saved is not None:
            self._restore(saved)
        course = self.course
        if course.ended:
            return
        room = Room.of(self._target, self._texts)
        again = self.total > self._steps_per_epoch
        course.remembered, line = decide(room, again, course.remembered)
        log(line)
        if course.remembered:
            self._source = remember(self._target, self._texts, self._batch_tokens, advance)
            if self._target.device.type == "cuda":
                self._recorded = RecordedSteps(self._update, self._batch_tokens)

    def run(self, work: Work, watch: Watch) -> Course:
        """Train until the steps or the time are used up."""
        course, began = self.course, time.monotonic() - self.course.seconds
        recent = _Recent(self._head.num_draft_tokens, self._target.device)
        for texts in () if course.ended else self._steps_left():
            course.ended = self._end()
            if course.ended:
                break
            recent.add(self._step(texts))
            course.step += 1
            course.tokens += sum(len(text.tokens) for text in texts)
            course.seconds = time.monotonic() - began
            if course.step % max(1, self.total // _POINTS) == 0:
                course.curve.append(recent.point(course.step))
            recent.show(self, watch)
            if course.step % self._wishes.save_every == 0:
                work.save_state(self._state(), self._about())
        course.ended = course.ended or self._end() or f"--epochs {self._wishes.epochs}"
        if recent.count:
            course.curve.append(recent.point(course.step))
        work.save_state(self._state(), self._about())
        return course

    def _steps_left(self) -> Iterator[list[Text]]:
        """All steps from here on; those that are behind are left out."""
        behind = self.course.step
        for number in range(self._wishes.epochs):
            steps = list(epoch(self._texts, self._batch_tokens, self._seed, number))
            yield from steps[min(behind, len(steps)) :]
            behind -= min(behind, len(steps))

    def _end(self) -> str:
        limit = self._wishes.time_limit
        if self._wishes.max_steps is not None and self.course.step >= self._wishes.max_steps:
            return f"--max-steps {self._wishes.max_steps}"
        if limit is not None and self.course.seconds >= limit:
            return f"--time-limit {limit:g}"
        return ""

    @property
    def share(self) -> float:
        """How much of the training is behind, by steps or by time."""
        by_steps = self.course.step / max(1, self.total)
        limit = self._wishes.time_limit
        by_time = self.course.seconds / limit if limit is not None else 0.0
        return min(1.0, max(by_steps, by_time))

    def _step(self, texts: list[Text]) -> Figures:
        self._set_rate(self._wishes.lr * schedule(self.share))
        firsts = self._source.firsts(texts)
        if self._recorded is not None:
            return self._recorded.run(texts, firsts)
        return self._update(make_batch(texts, firsts, self._target.device))

    def _set_rate(self, rate: float) -> None:
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        for group in self._optimiser.param_groups:
            group["lr"] = rate

    def _update(self, batch: Batch) -> Figures:
        """Learn from a batch. All that differs from one of the same shape is in its tensors."""
        figures = self._head.learn(batch, self._source.states(batch))
        clip_grad_norm_(self._named.values(), _CLIP)
        self._optimiser.step()
        self._optimiser.zero_grad()
        return figures

    def _state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"module.{name}": value for name, value in self._named.items()}
        for name, parameter in self._named.items():
            for key, value in self._optimiser.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def _about(self) -> dict[str, Any]:
        return asdict(self.course)

    def _restore(self, saved: SavedState) -> None:
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(saved.tensors[f"module.{name}"])
                # The fused version wants the count of steps beside the moments, on the device.
                self._optimiser.state[parameter] = {
                    key: saved.tensors[f"{key}.{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.course = Course(**saved.about)


class _Recent:
    """Sums of the figures since the last point, on the device: reading them would make it wait."""

    def __init__(self, num_draft_tokens: int, device: torch.device) -> None:
        self.count = 0
        self._loss = torch.zeros((), device=device)
        self._right = torch.zeros(num_draft_tokens, device=device)
        self._shown: float | None = None
        self._seen = 0

    def add(self, figures: Figures) -> None:
        self.count += 1
        self._loss += figures.loss
        self._right += figures.right

    def point(self, step: int) -> dict[str, float]:
        """The means since the last point, which start anew."""
        loss, right = self._means(step)
        self.count = 0
        self._loss.zero_()
        self._right.zero_()
        return {"step": step, "loss": loss, "accuracy": right}

    def _means(self, step: int) -> tuple[float, float]:
        loss = self._loss.item() / max(1, self.count)
        if not math.isfinite(loss):
            raise EngineError(
                f"the training's loss is {loss} at step {step}: it diverged. Lower --lr; what was "
                "saved before stays."
            )
        return round(loss, 4), round(self._right[0].item() / max(1, self.count), 4)

    def show(self, trainer: Trainer, watch: Watch) -> None:
        """Tell how things stand, now and then."""
        now, course = time.monotonic(), trainer.course
        if self._shown is not None and now - self._shown < _SHOW_EVERY_S:
            return
        self._shown = now
        if self.count:
            loss, right = self._means(course.step)
        else:
            loss, right = course.curve[-1]["loss"], course.curve[-1]["accuracy"]
        rate = course.tokens / max(1e-9, course.seconds)
        watch(Progress(course.step, trainer.total, trainer.share, loss, right, rate))


def schedule(share: float) -> float:
    """The learning rate's factor: up in a straight line, then down along a cosine."""
    if share < _WARM_UP:
        return (share + 0.01) / (_WARM_UP + 0.01)
    along = (share - _WARM_UP) / (1 - _WARM_UP)
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))
