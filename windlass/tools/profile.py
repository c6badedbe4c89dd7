"""Step time by kind of work, from torch's profiler, for one prefill step and for decode steps.

During profiling, the modules of the network run in named scopes, so that an operator or kernel is
attributed to the module that launched it. Kernels replayed from a captured graph have no scope and
are classified by name. Steps of a recorded CPU program are timed command by command.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest
from windlass.engine import Engine
from windlass.kernels.native.pool import Pool
from windlass.kernels.ops import Ops
from windlass.layers.attention import Attention
from windlass.layers.embedding import Embedding, PackedEmbedding, TiedEmbedding
from windlass.layers.linear import Linear
from windlass.layers.mlp import GatedMLP
from windlass.layers.norm import RMSNorm
from windlass.tools.common.device import device_of, synchronise
from windlass.tools.common.workload import Workload
from windlass.tools.profile_program import SCOPE, CommandTimes, gemm_names

Log = Callable[[str], None]
Spent = dict[str, tuple[float, int]]  # kind -> microseconds, calls

OTHER, HOST = "other", "host"
_GEMM = "GEMM"
_STEP = "windlass step"
_MAX_NAME = 60  # characters of a kernel name
_WIDTH = 120

# Kind of work of each operation of the network.
_OPERATIONS = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "qk_norm": "norm",
    "layer_norm": "norm",
    "add_layer_norm": "norm",
    "silu_mul": "activation",
    "gelu_mul": "activation",
    "activate": "activation",
    "rope_write": "rope and KV write",
    "attention": "attention",
}


class Rule(NamedTuple):
    """Classifies kernels and torch operators whose name matches."""

    kind: str
    pattern: re.Pattern[str]


def _rules(*pairs: tuple[str, str]) -> list[Rule]:
    return [Rule(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in pairs]


# Names that identify the work in any scope.
_CERTAIN = _rules(
    (
        "attention",
        r"^paged_|attention|^latent_(decode|prefill)|^gather_kernel|flash|fmha|scaled_dot",
    ),
    ("norm", r"^(add_)?rms_norm"),
    ("rope and KV write", r"^rope_"),
    ("activation", r"^silu_"),
    ("sampling", r"^sample_"),
    ("inputs", r"^decode_inputs"),
)
# For work outside of all scopes.
_LIKELY = _rules(
    (_GEMM, r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk|aten::(mm|addmm|bmm|linear)$"),
    (_GEMM, r"_(linear|gated)_kernel$|^int4_(wide|many)|^grouped_row|^eight_bit|^dequantise"),
    ("sampling", r"argmax|exponential|distribution|sort|topk|softmax|cumsum|scatter|reduce"),
    ("copies", r"memcpy|memset|aten::(to|_to_copy|copy_|tensor|lift_fresh|item|index)"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """One line of the table."""

    kind: str
    ms: float  # per step
    calls: float  # operators or kernels per step
    percent: float  # of the step


@dataclass(frozen=True, slots=True)
class Phase:
    """The steps of one phase. `wall_ms` is without the profiler, which slows the host down."""

    name: str
    steps: int
    tokens: int
    wall_ms: float
    profiled_ms: float
    shares: list[Share]
    executors: list[str]  # which executors took the steps, and why faster ones refused


@dataclass(frozen=True, slots=True)
class _Measured:
    """Time of some steps, and what it was spent on."""

    name: str
    steps: int
    tokens: int  # per step
    seconds: float
    spent: Spent  # empty without a profiler
    executors: list[str]

    @property
    def is_program(self) -> bool:
        """Whether a recorded program computed all steps."""
        return any(line.startswith(f"program: {self.steps} ") for line in self.executors)


def profile(
    config: EngineConfig, workload: Workload, num_steps: int, trace: Path | None, log: Log
) -> list[Phase]:
    """Profile the first step of the workload, and `num_steps` steps that decode only.

    `trace`: file for the decode steps, for Chrome or Perfetto; the prefill step is written beside it
    as trace.prefill.json.
    """
    opened = open_model(config)
    log(f"loading {opened.files.name}")
    built = build_engine(config, opened.source)
    log(f"{workload.name}: warming up")
    _drive(built, workload, 0, num_steps)
    log(f"{workload.name}: without the profiler")
    plain = _drive(built, workload, 1, num_steps)
    log(f"{workload.name}: with the profiler")
    network = built.weights.network
    profiler: Profiler = partial(_torch_times, device_of(network))
    if all(phase.is_program for phase in plain):
        pool, names = built.weights.parts.workers.pool, gemm_names(network)
        profiler = partial(_command_times, pool, names)
    with _scopes(network):
        profiled = _drive(built, workload, 2, num_steps, profiler, trace=trace)
    on_gpu = device_of(network).type == "cuda"
    return [_phase(before, after, on_gpu) for before, after in zip(plain, profiled, strict=True)]


class StepTimes(Protocol):
    """What the time of some steps was spent on."""

    def spent(self) -> Spent: ...

    def write_trace(self, path: Path) -> None: ...


Profiler = Callable[[], AbstractContextManager[StepTimes]]  # watches the steps inside its context


@dataclass(frozen=True, slots=True)
class _TorchTimes:
    """Operators and kernels, from torch's profiler."""

    profiler: torch_profile
    on_gpu: bool

    def spent(self) -> Spent:
        events = list(self.profiler.events() or [])
        return _device_time(events) if self.on_gpu else _operator_time(events)

    def write_trace(self, path: Path) -> None:
        self.profiler.export_chrome_trace(str(path))


@contextmanager
def _torch_times(device: torch.device) -> Iterator[StepTimes]:
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch_profile(activities=activities) as profiler:
        yield _TorchTimes(profiler, on_gpu)


@contextmanager
def _command_times(pool: Pool, gemms: dict[int, str]) -> Iterator[StepTimes]:
    """Commands of recorded CPU programs, which torch's profiler does not see."""
    times = CommandTimes(gemms)
    with pool.timed_by(times):
        yield times


def _drive(
    built: Built,
    workload: Workload,
    draw: int,
    num_steps: int,
    profiler: Profiler | None = None,
    trace: Path | None = None,
) -> list[_Measured]:
    """Run the prefill and `num_steps` decode steps of the workload, and abort the requests."""
    engine, device = built.engine, device_of(built.weights.network)
    engine.reset_prefix_cache()
    requests = workload.requests(built.report.vocab_size, draw)
    for i, request in enumerate(requests):
        max_tokens = built.report.max_model_len - len(request.prompt)
        sampling = SamplingParams(
            temperature=request.temperature, max_tokens=max_tokens, ignore_eos=True
        )
        engine.add(NewRequest(f"profile-{i}", request.prompt, sampling))
    prefill_trace = trace.with_suffix(f".prefill{trace.suffix}") if trace else None
    measure = partial(_measure, engine=engine, device=device, profiler=profiler)
    phases = [measure("prefill", num_steps=1, trace=prefill_trace)]
    while _computes_prompts(engine):
        continue
    phases.append(measure("decode", num_steps=num_steps, trace=trace))
    for i in range(len(requests)):
        engine.abort(f"profile-{i}")
    while engine.has_work:
        engine.step()
    return phases


def _computes_prompts(engine: Engine) -> bool:
    """Run a step; return whether it computed prompt tokens."""
    before = engine.stats().num_prompt_tokens_computed
    engine.step()
    return engine.stats().num_prompt_tokens_computed > before


def _measure(
    name: str,
    *,
    engine: Engine,
    num_steps: int,
    device: torch.device,
    profiler: Profiler | None,
    trace: Path | None,
) -> _Measured:
    before = engine.stats()
    with nullcontext() if profiler is None else profiler() as times:
        synchronise(device)
        started = time.perf_counter()
        for _ in range(num_steps):
            with record_function(_STEP):
                engine.step()
        synchronise(device)
        seconds = time.perf_counter() - started
    after = engine.stats()
    if times is not None and trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        times.write_trace(trace)
    return _Measured(
        name=name,
        steps=num_steps,
        tokens=after.num_step_tokens,
        seconds=seconds,
        spent={} if times is None else times.spent(),
        executors=_executors(after, before),
    )


def _executors(after: EngineStats, before: EngineStats) -> list[str]:
    """The executors of the steps between two stats, and the refusals of faster ones."""
    taken = {name: n - before.executors.get(name, 0) for name, n in after.executors.items()}
    lines = [f"{name}: {count} steps" for name, count in taken.items() if count]
    for name, reasons in after.refusals.items():
        for reason, count in reasons.items():
            count -= before.refusals.get(name, {}).get(reason, 0)
            if count:
                lines.append(f"{name} refused {count}: {reason}")
    return lines


# ---- scopes ------------------------------------------------------------------------------------


@contextmanager
def _scopes(network: nn.Module) -> Iterator[None]:
    """Wrap the modules of the network in scopes named by kind of work."""
    with ExitStack() as stack:
        for path, module in network.named_modules():
            name = path.rpartition(".")[2]
            if isinstance(module, Linear):
                kind = f"{_GEMM} {name} {sum(module.parts.values())}x{module.num_in}"
                for entry in ("forward", "raw", "then", "gated"):
                    scoped = _scoped(kind, getattr(module, entry))
                    stack.enter_context(_replaced(module, entry, scoped))
            elif isinstance(module, (Embedding, TiedEmbedding, PackedEmbedding)):
                kind = "embedding"
                stack.enter_context(_replaced(module, "forward", _scoped(kind, module.forward)))
            elif isinstance(module, (Attention, GatedMLP, RMSNorm)):
                stack.enter_context(_replaced(module, "ops", _scoped_ops(module.ops)))
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def _scoped_ops(ops: Ops) -> Ops:
    functions: dict[str, Any] = {
        name: _scoped(kind, getattr(ops, name)) for name, kind in _OPERATIONS.items()
    }
    return replace(ops, **functions)


def _scoped(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(SCOPE + kind):
            return function(*args, **kwargs)

    return call


# ---- counting ----------------------------------------------------------------------------------


def _phase(plain: _Measured, profiled: _Measured, on_gpu: bool) -> Phase:
    """Compute times by kind; the host gets the time in which the device is idle."""
    # On a CPU, operator times include the profiler's overhead, and so must the step time.
    wall_ms = 1e3 * (plain.seconds if on_gpu else profiled.seconds) / profiled.steps
    steps = profiled.steps
    lines = {kind: (us / 1e3 / steps, n / steps) for kind, (us, n) in profiled.spent.items()}
    busy_ms = sum(ms for ms, _ in lines.values())
    lines[HOST] = (max(0.0, wall_ms - busy_ms), 0.0)
    shares = [
        Share(kind=kind, ms=ms, calls=calls, percent=100 * ms / wall_ms)
        for kind, (ms, calls) in lines.items()
    ]
    return Phase(
        name=profiled.name,
        steps=steps,
        tokens=profiled.tokens,
        wall_ms=1e3 * plain.seconds / plain.steps,
        profiled_ms=1e3 * profiled.seconds / steps,
        executors=plain.executors,
        shares=sorted(shares, key=lambda share: -share.ms),
    )


def _operator_time(events: list[FunctionEvent]) -> Spent:
    """Sum self times of operators and scopes.

    Native code that torch does not trace counts as self time of its scope. Time of the step outside
    of both belongs to the host.
    """
    spent: Spent = {}
    for event in events:
        if event.name.startswith(SCOPE):
            _add(spent, event.name.removeprefix(SCOPE), event.self_cpu_time_total)
        elif event.name != _STEP and not event.is_user_annotation:
            _add(spent, kind_of(event.name, _ancestors(event)), event.self_cpu_time_total)
    return spent


def _device_time(events: list[FunctionEvent]) -> Spent:
    """Sum kernel times by the scope that launched them; kernels of a captured graph by name."""
    spent: Spent = {}
    launched: Counter[str] = Counter()
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        for kernel in event.kernels:
            if _is_scope(kernel.name):  # the scope's annotation on the device timeline
                continue
            _add(spent, kind_of(kernel.name, [event.name, *_ancestors(event)]), kernel.duration)
            launched[kernel.name] += 1
    for event in events:
        if event.device_type == DeviceType.CPU or _is_scope(event.name):
            continue
        if launched[event.name]:
            launched[event.name] -= 1
        else:
            _add(spent, kind_of(event.name, []), event.time_range.elapsed_us())
    return spent


def _is_scope(name: str) -> bool:
    return name == _STEP or name.startswith(SCOPE)


def _add(spent: Spent, kind: str, us: float) -> None:
    before, calls = spent.get(kind, (0.0, 0))
    spent[kind] = (before + us, calls + 1)


def _ancestors(event: FunctionEvent) -> list[str]:
    names, parent = [], event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    return names


def kind_of(name: str, ancestors: Sequence[str]) -> str:
    """Classify an operator or kernel. `ancestors`: enclosing operators and scopes, nearest first."""
    for rule in _CERTAIN:
        if rule.pattern.search(name):
            return rule.kind
    for scope in ancestors:
        if scope.startswith(SCOPE):
            return scope.removeprefix(SCOPE)
    for known in (name, *ancestors):
        for rule in _LIKELY:
            if rule.pattern.search(known):
                return f"{rule.kind} {name[:_MAX_NAME]}" if rule.kind == _GEMM else rule.kind
    return OTHER


# ---- printing -----------------------------------------------------------------------------------


def show(phases: Sequence[Phase]) -> None:
    """Print one table per phase, the largest share first."""
    console = Console(width=_WIDTH, soft_wrap=True, markup=False, highlight=False)
    for phase in phases:
        table = Table(box=None, pad_edge=False, title_justify="left")
        table.title = (
            f"{phase.name}: {phase.tokens:,} tokens, {phase.wall_ms:,.3f} ms per step "
            f"({phase.profiled_ms:,.3f} ms under the profiler), {phase.steps} steps"
        )
        table.add_column("work", no_wrap=True)
        for heading in ("ms per step", "% of the step", "calls per step"):
            table.add_column(heading, justify="right")
        for share in phase.shares:
            calls = f"{share.calls:,.0f}" if share.calls else "-"
            table.add_row(share.kind, f"{share.ms:,.3f}", f"{share.percent:.1f}", calls)
        console.print(table, *phase.executors, "", sep="\n")
