"""Records when each process of a server does what, for http_rate.py --trace.

`python http_trace.py serve MODEL ...` is `windlass serve` with the recording. Its child processes import
this file as well, since they are spawned, and so record too. Times are of one clock for all processes.
With WINDLASS_TRACE_STEP_MS the device is replaced by one that needs so long for each step, and
WINDLASS_TRACE_TOKEN_US for each token, so that the host's part can be measured without a GPU.
"""

from __future__ import annotations

import contextvars
import functools
import json
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "WINDLASS_TRACE"
STEP_MS, TOKEN_US = "WINDLASS_TRACE_STEP_MS", "WINDLASS_TRACE_TOKEN_US"
clock = time.perf_counter

Method = Callable[..., Any]


class Recorder:
    """What this process has recorded: spans by name, and the time of each stage of each request."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        self.stages: dict[str, dict[str, float]] = defaultdict(dict)
        self.device = DeviceTimes()

    def stage(self, name: str, request_id: str, at: float | None = None) -> None:
        self.stages[name].setdefault(request_id, clock() if at is None else at)

    def found(self, role: str = "") -> dict[str, Any]:
        return {
            "role": role,
            "pid": os.getpid(),
            "spans": self.spans,
            "stages": self.stages,
            "device": self.device.steps(),
        }

    def save(self, folder: str | Path, role: str) -> None:
        path = Path(folder) / f"{role}-{os.getpid()}.json"
        path.write_text(json.dumps(self.found(role)))


class DeviceTimes:
    """Start and end of each step on the device, on the host's clock."""

    def __init__(self) -> None:
        self.known: list[tuple[float, float]] = []  # of the replaced device
        self._events: list[tuple[Any, Any]] = []
        self._origin: Any = None
        self._origin_at = 0.0

    def begin(self) -> Any:
        import torch

        if not torch.cuda.is_available():
            return None
        if self._origin is None:
            self._origin = self._event()
            torch.cuda.synchronize()
            self._origin_at = clock()
        return self._event()

    def end(self, begun: Any) -> None:
        if begun is not None:
            self._events.append((begun, self._event()))

    @staticmethod
    def _event() -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def steps(self) -> list[tuple[float, float]]:
        if self._events:
            self._events[-1][1].synchronize()
        origin, at = self._origin, self._origin_at
        return self.known + [
            (at + origin.elapsed_time(start) / 1e3, at + origin.elapsed_time(end) / 1e3)
            for start, end in self._events
        ]


recorder = Recorder()


def wrap(owner: type, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method with what `make` returns for it."""
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(make(plain)))


def spanned(owner: type, name: str, note: Callable[..., tuple[float, ...]] | None = None) -> None:
    """Record start and end of each call of a method, and what `note` makes of its result."""
    spans = recorder.spans[name]

    def timed(plain: Method) -> Method:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            start = clock()
            result = plain(self, *args, **options)
            end = clock()
            spans.append((start, end, *(note(self, result, *args) if note else ())))
            return result

        return call

    wrap(owner, name, timed)


def before(owner: type, name: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of each call of a method, before it."""

    def noted(plain: Method) -> Method:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            note(self, *args)
            return plain(self, *args, **options)

        return call

    wrap(owner, name, noted)


# ---- the engine ------------------------------------------------------------------------------


class _Pending:
    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def wait(self) -> Any:
        start = clock()
        result = self._pending.wait()
        recorder.spans["wait"].append((start, clock()))
        return result


class TracedRunner:
    """Records the steps of a runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def submit(self, plan: Any) -> Any:
        start = clock()
        begun = recorder.device.begin()
        pending = self._runner.submit(plan)
        recorder.device.end(begun)
        num_prompt = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        recorder.spans["submit"].append((start, clock(), len(plan.rows), num_prompt))
        return _Pending(pending)

    def run(self, plan: Any) -> Any:
        return self.submit(plan).wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class FixedTimeRunner:
    """Computes nothing: a step takes a fixed time, and every token is the same."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self._step_s, self._token_s = step_s, token_s
        self._free_at = 0.0

    def submit(self, plan: Any) -> Any:
        start = max(clock(), self._free_at)
        self._free_at = start + self._step_s + self._token_s * plan.num_tokens
        recorder.device.known.append((start, self._free_at))
        return _FixedTimeStep(plan, self._free_at)


class _FixedTimeStep:
    def __init__(self, plan: Any, ends_at: float) -> None:
        self._plan = plan
        self._ends_at = ends_at

    def wait(self) -> Any:
        from windlass.core.types import RowResult, StepResult

        if (left := self._ends_at - clock()) > 0:
            time.sleep(left)
        rows = [RowResult([97] if row.sample else []) for row in self._plan.rows]
        return StepResult(rows, executor="fixed")


def trace_engine() -> None:
    from windlass.core.scheduler import Scheduler
    from windlass.engine import Engine
    from windlass.serve.loop import _EngineLoop

    def traced(make: Method) -> Method:
        def make_traced(self: Any, scheduler: Any, runner: Any, *args: Any, **options: Any) -> None:
            if STEP_MS in os.environ:
                step_s = float(os.environ[STEP_MS]) / 1e3
                runner = FixedTimeRunner(step_s, float(os.environ.get(TOKEN_US, "0")) / 1e6)
                options["overlap"] = True
            make(self, scheduler, TracedRunner(runner), *args, **options)

        return make_traced

    wrap(Engine, "__init__", traced)

    def committed(_: Any, outputs: Any, *_args: Any) -> tuple[float, ...]:
        num_ended = 0
        for output in outputs:
            if output.timeline is not None:
                if output.timeline.num_output == 1:
                    recorder.stage("first_token", output.request_id)
                if output.finish is not None:
                    recorder.stage("last_token", output.request_id)
                    num_ended += 1
        return len(outputs), num_ended

    def planned(_: Any, plan: Any, *_args: Any) -> tuple[float, ...]:
        for admission in plan.admitted:
            recorder.stage("planned", admission.request_id)
        return len(plan.rows), len(plan.admitted)

    before(Scheduler, "add", lambda _, new, _now: recorder.stage("engine_add", new.request_id))
    spanned(Scheduler, "add")
    spanned(Scheduler, "plan", planned)
    spanned(Scheduler, "commit", committed)
    spanned(_EngineLoop, "_receive")
    spanned(_EngineLoop, "_send")
    spanned(_EngineLoop, "_step")


# ---- the server's process and its HTTP workers -----------------------------------------------


def trace_server() -> None:
    from windlass.serve.client import EngineClient
    from windlass.serve.http.broker import Broker
    from windlass.serve.replica import Replica

    def submitted(_: Any, message: Any) -> None:
        for request in message.requests:
            recorder.stage("server_got", request.request_id)

    def sent(_: Any, adds: Any) -> None:
        for add in adds:
            recorder.stage("server_sent", add.request.request_id)

    before(Broker, "_submit", submitted)
    before(Replica, "add", sent)
    before(
        EngineClient,
        "_finished",
        lambda _, _flight, output: recorder.stage("server_ended", output.request_id),
    )
    spanned(Replica, "on_message")
    spanned(Broker, "_flush")
    spanned(Broker, "_submit")


def trace_worker() -> None:
    from windlass.serve.http.forward import Dispatch
    from windlass.serve.http.remote import RemoteClient
    from windlass.serve.response import EventStream
    from windlass.serve.transport import CONNECTION, LimitedProtocol

    current: contextvars.ContextVar[Any] = contextvars.ContextVar("current")
    times: dict[int, float] = {}

    def connected(protocol: Any, _transport: Any) -> None:
        recorder.spans["connected"].append((clock(),))
        times[id(protocol)] = clock()

    def submitting(_: Any, requests: Any, *_args: Any) -> None:
        protocol = current.get()[CONNECTION]
        for request in requests:
            recorder.stage("connected", request.request_id, times.get(id(protocol)))
            recorder.stage("body_read", request.request_id, times.get(-id(protocol)))
            recorder.stage("worker_sent", request.request_id)

    def read(protocol: Any) -> None:
        times[-id(protocol)] = clock()

    def in_context(call: Method) -> Method:
        async def call_in_context(self: Any, scope: Any, receive: Any, send: Any) -> None:
            current.set(scope)
            await call(self, scope, receive, send)

        return call_in_context

    def noting_end(stream: Method) -> Method:
        async def stream_and_note(self: Any, *args: Any) -> None:
            await stream(self, *args)
            for request_id in self._completion._by_id:
                recorder.stage("worker_closed", request_id)

        return stream_and_note

    wrap(Dispatch, "__call__", in_context)
    wrap(EventStream, "_send_all", noting_end)

    def arrived(_: Any, outputs: Any) -> None:
        for output in outputs:
            if output.finish is not None:
                recorder.stage("worker_ended", output.request_id)

    before(LimitedProtocol, "connection_made", connected)
    before(LimitedProtocol, "on_message_complete", read)
    before(RemoteClient, "submit", submitting)
    before(RemoteClient, "on_outputs", arrived)
    spanned(RemoteClient, "on_outputs")


def install(folder: str) -> None:
    """Trace this process, and save what it recorded when it ends."""
    import atexit

    name = multiprocessing.current_process().name
    role = name if name.startswith("windlass-") else "server"
    if name == "windlass-engine":
        trace_engine()
    elif name.startswith("windlass-http"):
        trace_worker()
    elif name == "MainProcess":
        trace_server()
    else:
        return
    atexit.register(recorder.save, folder, role)


if FOLDER in os.environ and __name__ in ("__main__", "__mp_main__"):
    install(os.environ[FOLDER])

if __name__ == "__main__":
    from windlass.cli.entry import main

    main()
