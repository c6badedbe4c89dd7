"""The engine process: builds the engine, then handles messages and runs steps until Stop.

The process starts before the build is known, so that slow imports overlap with opening the model's
files. It exits when its parent dies, and a watchdog ends it when a step hangs. It reports outputs
and errors per request, and knows nothing of clients or HTTP.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import zmq

from windlass.child_process import die_with_parent, dump_stacks_on_signal, ignore_signals
from windlass.core.card import EngineReport
from windlass.core.types import PinnedPrefix
from windlass.engine import Engine
from windlass.errors import EngineError, RequestError, WorkerDied
from windlass.serve import messages
from windlass.serve.code_pages import release_code
from windlass.serve.journal import Journal
from windlass.serve.logs import inherit_logging, set_log_level

Build = Callable[[], tuple[Engine, EngineReport]]
Prepare = Callable[[], None]

_log = logging.getLogger("windlass.engine")

_IDLE_POLL_MS = 250
_LOADING_POLL_MS = 2
_STATS_INTERVAL_S = 0.1
_EXPERT_LOAD_INTERVAL_S = 10.0
_WAIT_FOR_BATCH_S = 0.002
_MAX_FAILED_STEPS = 3
_MAX_FINAL_STEPS = 16
_LINGER_MS = 2000
# The HTTP process considers the engine hung after `hang_timeout`, sends DUMP_SIGNAL, and kills it after
# 1.5 times that (health.py). In between, the engine process dumps its stacks once more and exits.
_SELF_EXIT_AFTER = 1.25


@dataclass(frozen=True, slots=True)
class Launch:
    """Start parameters of an engine process."""

    address: str  # of the HTTP process's socket
    journal: Path
    hang_timeout: float  # seconds; 0: no watchdog


def engine_main(launch: Launch, prepare: Prepare, build_pipe: Connection) -> NoReturn:
    """Main function of the engine process; exits with code 0 only after a Stop message.

    It calls `prepare` and then waits for a Build, the only object sent through `build_pipe`.
    """
    die_with_parent()
    inherit_logging()
    ignore_signals()
    # Torch's allocator would keep the memory that loading needed until the next allocation.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
    dump_stacks_on_signal()
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.connect(launch.address)
    try:
        code = _build_and_run(socket, prepare, build_pipe, launch=launch)
    finally:
        socket.close()
        context.term()
    sys.exit(code)


def _build_and_run(
    socket: zmq.Socket[bytes], prepare: Prepare, build_pipe: Connection, *, launch: Launch
) -> int:
    try:
        began = time.perf_counter()
        prepare()
        seconds = {"prepare": time.perf_counter() - began}
        build: Build = build_pipe.recv()
        engine, report = build()
        report = replace(report, seconds={**seconds, **report.seconds})
    except Exception as error:  # process boundary: reported to the parent
        if not isinstance(error, EngineError):
            _log.exception("the engine could not be built")
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        socket.send(messages.encode([messages.Failed(type(error).__name__, text)]))
        return 1
    release_code()
    journal = Journal(launch.journal)
    engine.watch_plans(journal.planned)
    socket.send(messages.encode([messages.Ready(report)]))
    try:
        return _EngineLoop(engine, socket, journal, hang_timeout=launch.hang_timeout).run()
    finally:
        faulthandler.cancel_dump_traceback_later()
        journal.close()


class _EngineLoop:
    """Owns the state of the loop between steps."""

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], journal: Journal, *, hang_timeout: float
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._journal = journal
        self._hang_timeout = hang_timeout
        self._outgoing: list[messages.FromEngine] = []
        self._loading: deque[messages.LoadAdapter] = deque()
        self._num_adds = 0
        self._num_steps = 0
        self._failed_steps = 0
        self._fatal: str | None = None  # why no further step can succeed
        self._stats_at = 0.0
        self._expert_load_at = time.monotonic()
        self._armed_at = float("-inf")
        self._stopping = False

    def run(self) -> int:
        while True:
            self._arm_watchdog()
            self._receive()
            if self._stopping:
                self._update_expert_load()
                self._engine.close()
                return 0
            if self._engine.has_work:
                self._step()
            self._report_loads()
            for request_id, blocks in self._engine.handed_over():
                self._outgoing.append(messages.HandedOver(request_id, blocks))
            self._send(force=not (self._engine.has_work or self._loading))
            if self._fatal is not None:
                _log.error("the engine process exits: %s", self._fatal)
                return 1

    def _update_expert_load(self) -> None:
        self._expert_load_at = time.monotonic()
        try:
            self._engine.update_expert_load()
        except OSError as error:  # a full disk must not end the engine
            _log.error("the load of experts could not be recorded: %s", error)

    def _arm_watchdog(self) -> None:
        now = time.monotonic()
        if self._hang_timeout and now - self._armed_at >= min(1.0, self._hang_timeout / 4):
            faulthandler.dump_traceback_later(self._hang_timeout * _SELF_EXIT_AFTER, exit=True)
            self._armed_at = now

    def _receive(self) -> None:
        """Handle all frames that have arrived; wait for one only when there is nothing to compute."""
        is_moving = self._loading or self._engine.is_handing_over
        idle_ms = _LOADING_POLL_MS if is_moving else _IDLE_POLL_MS
        is_busy = self._engine.has_work or self._engine.capture_next()
        if not is_busy:
            self._socket.poll(idle_ms)
        while (frame := self._next_frame()) is not None:
            for message in messages.decode_to_engine(frame):
                if not isinstance(message, messages.Add):
                    self._journal.added()
                self._handle(message)
        self._journal.added()

    def _next_frame(self) -> bytes | None:
        """A frame that has arrived; None: there is none."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _handle(self, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                self._add(message)
            case messages.Abort(request_id):
                self._engine.abort(request_id)
                self._journal.ended([request_id])
            case messages.ResetPrefixCache(number):
                self._outgoing.append(
                    messages.CacheReset(number, self._engine.reset_prefix_cache())
                )
            case messages.GetTrace(number, request_id):
                self._outgoing.append(messages.TraceReply(number, self._engine.trace(request_id)))
            case messages.GetMemory(number):
                self._outgoing.append(messages.MemoryReply(number, self._engine.memory()))
            case messages.PinPrefix() | messages.UnpinPrefix():
                self._pin_or_unpin(message)
            case messages.Sleep() | messages.Wake():
                self._sleep_or_wake(message)
            case messages.LoadAdapter() | messages.UnloadAdapter():
                self._change_adapter(message)
            case messages.Configure():
                self._configure(message)
            case messages.Stop():
                self._stopping = True

    def _configure(self, settings: messages.Configure) -> None:
        self._engine.set_caps(settings.caps)
        set_log_level(settings.log_level)
        if settings.hang_timeout != self._hang_timeout:
            faulthandler.cancel_dump_traceback_later()  # `run` arms it again, unless there is none
            self._hang_timeout, self._armed_at = settings.hang_timeout, float("-inf")

    def _add(self, add: messages.Add) -> None:
        self._num_adds += 1
        request = add.request
        try:
            self._journal.adding(add)
            self._engine.add(request, add.handed)
        except Exception as error:  # an error of one request must not end the others
            self._refuse(request.request_id, error)

    def _pin_or_unpin(self, call: messages.PinPrefix | messages.UnpinPrefix) -> None:
        try:
            if isinstance(call, messages.PinPrefix):
                prefix = self._engine.pin_prefix(call.name, call.request, call.on_device)
            else:
                prefix = PinnedPrefix(num_blocks=self._engine.unpin_prefix(call.name))
            reply = messages.PinReply(call.number, prefix)
        except EngineError as error:
            param = error.param if isinstance(error, RequestError) else None
            reply = messages.PinReply(
                call.number, kind=type(error).__name__, message=str(error), param=param
            )
        self._outgoing.append(reply)

    def _sleep_or_wake(self, call: messages.Sleep | messages.Wake) -> None:
        kind = text = ""
        faulthandler.cancel_dump_traceback_later()  # a disk may be slow; `run` arms it again
        self._armed_at = float("-inf")
        try:
            if isinstance(call, messages.Sleep):
                self._finish_steps()
                self._engine.sleep()
            else:
                self._engine.wake()
        except EngineError as error:
            kind, text = type(error).__name__, str(error)
        memory = self._engine.memory()
        reply = messages.MemoryReply(call.number, memory, kind=kind, message=text)
        self._outgoing.append(reply)

    def _finish_steps(self) -> None:
        """Finish the steps in flight, which requests aborted just now may have."""
        for _ in range(_MAX_FINAL_STEPS):
            if self._engine.has_work:
                self._step()

    def _change_adapter(self, change: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        """Reply to an unload at once; `_report_loads` replies to a load when it is complete."""
        try:
            if isinstance(change, messages.LoadAdapter):
                self._engine.adapters.load(change.name, change.folder, *change.roots)
                self._loading.append(change)
            else:
                num_running = self._engine.adapters.unload(change.name)
                self._outgoing.append(messages.AdapterReply(change, num_running))
        except EngineError as error:
            self._outgoing.append(_failed_change(change, error))

    def _report_loads(self) -> None:
        """Reply to the loads that have completed or failed, in the order of the calls."""
        while self._loading:
            change = self._loading[0]
            try:
                if not self._engine.adapters.loaded(change.name):
                    return
                self._outgoing.append(messages.AdapterReply(change))
            except EngineError as error:
                self._outgoing.append(_failed_change(change, error))
            self._loading.popleft()

    def _refuse(self, request_id: str, error: Exception) -> None:
        self._journal.ended([request_id])
        kind, text = type(error).__name__, str(error)
        if not isinstance(error, EngineError):
            _log.error("request %s could not be added", request_id, exc_info=error)
            kind, text = "EngineError", f"{kind}: {text}"
        param = error.param if isinstance(error, RequestError) else None
        self._outgoing.append(messages.Refused(request_id, kind, message=text, param=param))

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # running requests end with an error; the engine continues
            self._report_failure(error)
            text = f"{type(error).__name__}: {error}"
            self._outgoing.append(messages.StepFailed(self._journal.running(), text))
            outputs = self._engine.fail(f"the step that computed this request failed: {text}")
        else:
            self._failed_steps = 0
        if outputs:
            self._journal.ended([each.request_id for each in outputs if each.finish is not None])
            self._outgoing.append(messages.Outputs(outputs))
        else:
            self._wait_for_batch()

    def _report_failure(self, error: Exception) -> None:
        self._failed_steps += 1
        if isinstance(error, WorkerDied):
            self._fatal = str(error)
            if error.__cause__ is None or isinstance(error.__cause__, WorkerDied):
                return  # another rank failed; this one has nothing to add
        elif self._failed_steps >= _MAX_FAILED_STEPS:
            self._fatal = f"{self._failed_steps} steps in a row failed."
        _log.error("a step failed (%d in a row)", self._failed_steps, exc_info=error)

    def _wait_for_batch(self) -> None:
        """Sleep briefly if the last call ran no step: a static batch is still filling."""
        num_steps = self._engine.stats().num_steps
        if num_steps == self._num_steps:
            time.sleep(_WAIT_FOR_BATCH_S)
        self._num_steps = num_steps

    def _send(self, force: bool) -> None:
        now = time.monotonic()
        if now - self._expert_load_at >= _EXPERT_LOAD_INTERVAL_S:
            self._update_expert_load()
        if force or now - self._stats_at >= _STATS_INTERVAL_S:
            self._stats_at = now
            self._outgoing.append(messages.Stats(self._engine.stats(), self._num_adds))
        if traces := self._engine.traces():
            self._outgoing.insert(0, messages.Traces(traces))
        if self._outgoing:
            self._socket.send(messages.encode(self._outgoing))
            self._outgoing.clear()


def _failed_change(
    change: messages.LoadAdapter | messages.UnloadAdapter, error: EngineError
) -> messages.AdapterReply:
    return messages.AdapterReply(change, kind=type(error).__name__, message=str(error))
