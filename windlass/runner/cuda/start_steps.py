"""The steps of a start on CUDA: they compile kernels, and measure memory and launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from windlass.core.card import Choice
from windlass.core.types import StepPlan
from windlass.runner.cuda.graph_memory import bytes_of_others
from windlass.runner.cuda.graphs import AtStart
from windlass.runner.device import gib
from windlass.runner.runner import Runner
from windlass.runner.warmup import WarmUp
from windlass.start_log import start_log

# Steps of up to so many times the tokens that the GPU computes while the host launches one are captured.
# Measured on an H200 with Qwen3-0.6B: between two steps, the host does other work too.
_LAUNCH_SLOWDOWN = 2
# Seconds of a step beside which loading its kernels, as the first run does, counts for nothing.
_LONG_STEP_S = 0.3


class MakeRunner(Protocol):
    """Makes a runner with one KV block that captures these graphs; None: none."""

    def __call__(self, at_start: AtStart | None) -> Runner: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds until a small step is launched, and until the largest is computed."""

    launched: float
    computed: float
    num_tokens: int  # of the largest step

    @property
    def launch_bound(self) -> int:
        """Tokens up to which the host launches a step slower than the GPU computes it."""
        return int(_LAUNCH_SLOWDOWN * self.num_tokens * self.launched / self.computed)

    def choice(self, max_tokens: int) -> Choice:
        """The start-up line of the steps that are captured. `max_tokens`: of a step."""
        from windlass.runner.cuda.mixed import mixed_sizes

        captured = mixed_sizes(max_tokens, self.launch_bound)[-1]
        reason = (
            f"the host launches a step in {1e3 * self.launched:.1f} ms, and the GPU computes "
            f"{self.num_tokens:,} tokens in {1e3 * self.computed:.1f} ms"
        )
        return Choice("captured mixed steps", f"up to {captured:,} tokens", reason)


class StartSteps:
    """Runs the plans of a start.

    With several ranks all steps compute: their collectives would wait for kernels that do not run.
    """

    def __init__(
        self,
        make: MakeRunner,
        plans: WarmUp,
        *,
        device: torch.device,
        num_ranks: int,
        captures: bool,
    ) -> None:
        """`captures`: some steps will be captured."""
        self._make = make
        self._plans = plans
        self._device = device
        self._is_alone = num_ranks == 1
        self._captures = captures

    def compile(self) -> None:
        """Compile the kernels of all steps in parallel, unless the cache has those of a small one."""
        if not self._is_alone:
            return
        from windlass.kernels.triton.precompile import counted, only_compiling

        with counted() as counts, only_compiling() as wait_for_first:
            small, *others = self._plans.smallest_first
            self._make(None).run(small)
            wait_for_first()
            if is_cold := bool(counts["compiled"]):  # one missed: do not wait for the slowest
                self._launch(others)
        if counts["compiled"] and not is_cold:  # the cache has some kernels of the small step
            with only_compiling():
                self._launch(others)

    def _launch(self, plans: Sequence[StepPlan]) -> None:
        """Run these steps and those of all graphs."""
        runner = self._make(None)
        for plan in plans:
            runner.run(plan)
        self._make(AtStart.ALL)

    def run_largest(self, drain: Callable[[], None]) -> tuple[int, StepTimes | None]:
        """Bytes of the largest step, and the times that decide which steps are captured.

        `drain`: waits for other stages. None: nothing is captured, or several ranks capture alike.
        """
        runner, device, plans = self._make(None), self._device, self._plans
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        _, computed = timed(runner, plans.largest)
        for plan in plans.variants:
            runner.run(plan)
        with self._without_kernels():
            runner.run(plans.cached)
        activations = torch.cuda.max_memory_allocated(device) - held
        drain()
        if not self._is_alone or not self._captures:
            return activations, None
        launched, _ = timed(runner, plans.smallest_first[0])
        if computed <= _LONG_STEP_S:
            _, computed = timed(runner, plans.largest)
        return activations, StepTimes(launched, computed, plans.largest.num_tokens)

    def _without_kernels(self) -> AbstractContextManager[object]:
        """Steps allocate what they need, and compute nothing."""
        if not self._is_alone:
            return nullcontext()
        from windlass.kernels.triton.precompile import only_compiling

        return only_compiling()

    def graph_bytes(self) -> int:
        """An upper estimate of the bytes of all graphs: the largest and a few others are captured."""
        free = partial(free_after_sync, self._device)
        before = free()
        runner = self._make(AtStart.ENDS)
        others = bytes_of_others(runner.executors, free)
        graphs = before - free() + others
        del runner
        free()
        return max(0, graphs)


def timed(runner: Runner, plan: StepPlan) -> tuple[float, float]:
    """Seconds until a step is launched, and until it is computed."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    pending = runner.submit(plan)
    launched = time.perf_counter() - start
    pending.wait()
    torch.cuda.synchronize()
    return launched, time.perf_counter() - start


def bytes_kept(used: int, estimate: int, at_start: AtStart) -> int:
    """The bytes of the graphs: those in use after a start, or the estimate if others are captured later."""
    if used > estimate:
        start_log.warning(
            "the CUDA graphs take %s, %s more than was left for them beside the KV cache. If a step runs "
            "out of memory, lower --memory-share.",
            *(gib(used), gib(used - estimate)),
        )
    return max(0, used) if at_start is AtStart.ALL else max(used, estimate)


def free_after_sync(device: torch.device) -> int:
    """Free bytes of the device, without what torch keeps."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
