"""A replica of a model in a fleet: one engine in its own process, supervised as the server's is.

Ray Serve makes one `ModelReplica` per replica, and calls its methods in one event loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

import ray
from ray import serve

from windlass.build import open_model
from windlass.cluster.adapters import AdapterResult
from windlass.cluster.autoscaling import RateMeter
from windlass.cluster.fleet import Model
from windlass.cluster.replica_sleep import ReplicaSleep
from windlass.cluster.routing import Call
from windlass.core.card import EngineReport
from windlass.core.memory import Memory
from windlass.core.trace import RequestTrace
from windlass.core.types import EngineStats, NewRequest, Output
from windlass.errors import EngineError, WorkerDied
from windlass.serve.adapter_registry import Change
from windlass.serve.health import Health
from windlass.serve.http.messages import ErrorMessage
from windlass.serve.messages import LoadAdapter
from windlass.serve.routing import DECODE_WEIGHT
from windlass.start import build_replicas, make_client

_SMOOTHING = 1 / 16
_RESTART_POLL_S = 0.05
_MAX_ADAPTER_WAIT_S = 10.0
_FIRST_OUTPUT = 128.0  # expected output tokens, before any request has ended


@dataclass(frozen=True, slots=True)
class Frame:
    """Outputs of one request since the last frame; `error` ends it."""

    outputs: list[Output]
    traces: list[RequestTrace]
    error: ErrorMessage | None = None
    incident: str = ""  # identifies the end of an engine, which may have run several requests


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A replica's state, for the ingress. `num_outstanding`: as the router counts tokens."""

    replica: str
    node: str  # Ray's id
    pid: int
    engine_pid: int | None
    num_launches: int  # of engine processes; each begins with new stats
    num_ends: int  # of engine processes that died or hung
    report: EngineReport
    adapters: dict[str, str]  # folders by name
    adapter_roots: dict[str, tuple[str, ...]]  # folders to which adapters are confined
    stats: EngineStats
    health: Health
    num_outstanding: float
    is_asleep: bool = False  # in the warm pool
    asleep_bytes: int | None = None  # of its engine; None: it has not slept yet


@dataclass(slots=True)
class _Running:
    """A request in flight, for the expected number of output tokens."""

    max_tokens: float
    num_output: int = 0


class ModelReplica:
    """Owns one engine and its requests."""

    async def __init__(self, model: Model, hang_timeout: float) -> None:  # type: ignore[misc]
        began = time.monotonic()
        config = model.engine
        self._id = serve.get_replica_context().replica_id.unique_id
        self._frame_s = model.frame_ms / 1e3
        self._client = make_client(config, hang_timeout, retry_on_restart=False)
        self._client.on_traces = self._on_traces
        self._running: dict[str, _Running] = {}
        # Before the model, which may fail to load: Ray deletes the replica then.
        self._sleep = ReplicaSleep(self._client, lambda: bool(self._running))
        self._num_requests = 0
        self._traces: dict[str, list[RequestTrace]] = {}
        self._mean_output = _FIRST_OUTPUT
        self._prompt_rate, self._decode_rate = RateMeter(), RateMeter()
        opened = await asyncio.to_thread(open_model, config)
        self._client.build_with(*build_replicas(config, opened.source))
        self._report = await self._client.start()
        self._start_s = time.monotonic() - began
        await self._sleep.measure()

    def reconfigure(self, config: dict[str, float]) -> None:
        """Follow the warm pool's settings. Serve calls it at the start and after every change."""
        self._sleep.idle_s = config["sleep_after_s"]

    # ---- requests ----------------------------------------------------------------------------

    async def generate(self, call: Call) -> AsyncGenerator[Frame, None]:
        """Yield the outputs of a request in frames; a caller that goes away aborts it."""
        request = call.request
        if call.remaining_s is not None:
            request = replace(request, deadline=time.monotonic() + call.remaining_s)
        name = request.request_id
        self._running[name] = _Running(request.sampling.max_tokens or float("inf"))
        self._traces[name] = []
        self._num_requests += 1
        try:
            await self._sleep.wake()
            await self._engine_up()
            await self._adapter_up(request.adapter)
            async for outputs in self._outputs(request, call.tracked):
                traces, self._traces[name] = self._traces[name], []
                yield Frame(outputs, traces)
        except EngineError as error:
            incident = f"{self._id} {self._client.replicas[0].num_ends}"
            yield Frame([], self._traces[name], ErrorMessage.of(error), incident)
        finally:
            del self._running[name], self._traces[name]
            self._sleep.used()

    async def _engine_up(self) -> None:
        """Hold a request while the engine is restarted."""
        while not self._client.health().ok and not self._client.failed.is_set():
            await asyncio.sleep(_RESTART_POLL_S)

    async def _adapter_up(self, name: str) -> None:
        """Hold a request whose adapter the ingress loads after the start of this replica."""
        end = time.monotonic() + _MAX_ADAPTER_WAIT_S
        while name and name not in self._client.adapter_names and time.monotonic() < end:
            await asyncio.sleep(_RESTART_POLL_S)

    async def _outputs(
        self, request: NewRequest, tracked: bool
    ) -> AsyncGenerator[list[Output], None]:
        """Yield the outputs that have arrived, at most one list in `frame_ms`."""
        client = self._client
        inbox = client.submit([request], tracked)
        running = self._running[request.request_id]
        sent_at = float("-inf")
        try:
            while (output := await client.next(inbox)) is not None:
                wait_s = sent_at + self._frame_s - time.monotonic()
                if wait_s > 0 and output.finish is None:
                    await asyncio.sleep(wait_s)
                outputs = [output]
                while not inbox.is_empty and (output := await client.next(inbox)) is not None:
                    outputs.append(output)
                running.num_output += sum(len(each.tokens) for each in outputs)
                if outputs[-1].finish is not None:
                    self._mean_output += _SMOOTHING * (running.num_output - self._mean_output)
                yield outputs
                sent_at = time.monotonic()
        finally:
            client.drop(inbox)

    def _on_traces(self, _replica: int, traces: list[RequestTrace]) -> None:
        for trace in traces:
            if trace.request_id in self._traces:  # else the caller has gone away
                self._traces[trace.request_id].append(trace)

    # ---- calls to every replica ----------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        engine = self._client.replicas[0]
        prompt_tokens, decode_tokens = self._pending()
        return Snapshot(
            replica=self._id,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            engine_pid=engine.pid,
            num_launches=engine.num_launches,
            num_ends=engine.num_ends,
            report=self._report,
            adapters=dict(self._client.adapters.folders),
            adapter_roots=dict(self._client.adapters.roots),
            stats=engine.stats,
            health=Health(True) if self._sleep.is_asleep else self._client.health(),
            num_outstanding=prompt_tokens + DECODE_WEIGHT * decode_tokens,
            is_asleep=self._sleep.is_asleep,
            asleep_bytes=self._sleep.asleep_bytes,
        )

    async def change_adapters(self, changes: Sequence[Change]) -> AdapterResult:
        """Load and unload adapters, except where that was done already."""
        num_running, folders = 0, self._client.adapters.folders
        try:
            for change in changes:
                if isinstance(change, LoadAdapter) != (change.name in folders):
                    await self._sleep.wake()
                    num_running += await self._client.change_adapter(change)
        except EngineError as error:
            return AdapterResult(self._id, num_running, ErrorMessage.of(error))
        finally:
            self._sleep.used()
        return AdapterResult(self._id, num_running)

    async def reset_prefix_cache(self) -> int:
        return await self._client.reset_prefix_cache()

    async def memory(self) -> tuple[str, Memory]:
        return self._id, (await self._client.memory())[0]

    async def trace(self, request_id: str) -> RequestTrace | None:
        return await self._client.trace(request_id)

    # ---- what Ray Serve asks -------------------------------------------------------------------

    def _pending(self) -> tuple[float, float]:
        """Prompt tokens to compute, and output tokens to expect."""
        expected = (
            max(1.0, min(each.max_tokens, self._mean_output) - each.num_output)
            for each in self._running.values()
        )
        return float(self._client.backlog.num_tokens), sum(expected)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of this replica; serve_policy.py has the names."""
        stats = self._client.replicas[0].stats
        self._prompt_rate.observe(stats.num_prompt_tokens_computed, stats.account.prefill_s)
        self._decode_rate.observe(stats.num_generated_tokens, stats.account.decode_s)
        prompt_tokens, decode_tokens = self._pending()
        return {
            "prompt_tokens": prompt_tokens,
            "decode_tokens": decode_tokens,
            "prompt_rate": self._prompt_rate.tokens_per_s,
            "decode_rate": self._decode_rate.tokens_per_s,
            "num_requests": float(self._num_requests),
            "start_s": self._start_s,
            **self._sleep.metrics(),
        }

    async def check_health(self) -> None:
        """Raise when the engine is not restarted any more: Ray Serve replaces the replica."""
        if self._client.failed.is_set():
            raise WorkerDied(f"{self._client.health().reason}.")

    async def __del__(self) -> None:
        self._sleep.close()
        await self._client.close()
