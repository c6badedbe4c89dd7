"""Compiles the grammars of an engine's requests, once each, while steps go on.

A grammar is checked in the sandbox, then built in this process, both by threads; the engine's thread
only looks at what they have done. Equal grammars share one entry. Entries that no request uses are
kept, built and refused ones apart, and the least recently used make place for others.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.core.types import GrammarStats
from windlass.errors import EngineError
from windlass.text.grammar.matcher import Clock, RequestMatcher
from windlass.text.grammar.sandbox import Ticket, Verdict

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_JOBS = 4  # at once; each may take the memory of one grammar
_MAX_KEPT = 256  # built grammars that no request uses
_MAX_REFUSED = 1024
_STACK_BYTES = 16 * 2**20  # of threads that build: eight times what the sandbox has


class Backend(Protocol):
    """What compiles; its methods block."""

    def check(self, form: StructuredOutputs, ticket: Ticket) -> Verdict: ...

    def build(self, verdict: Verdict) -> LLMatcher: ...


class _Job:
    """Work in a thread of its own. `take_in`, which it returns, is called by the engine's thread."""

    def __init__(self, work: Callable[[], Callable[[], None]], ticket: Ticket) -> None:
        self.ticket = ticket
        self.take_in: Callable[[], None] | None = None
        self.error: EngineError | None = None
        self.done = threading.Event()  # set last
        self._work = work

    def start(self) -> None:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="windlass-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        try:
            self.take_in = self._work()
        except EngineError as error:
            self.error = error
        except Exception as error:  # the border of the thread: told to the requests that wait
            self.error = EngineError(f"{type(error).__name__}: {error}")
        finally:
            self.done.set()


@dataclass(slots=True, eq=False)
class _Entry:
    """One grammar: to be checked, checked, then refused or built."""

    key: bytes
    form: StructuredOutputs | None  # None: nothing is left to compile
    waiting: set[str] = field(default_factory=set)  # requests that have not started
    num_running: int = 0  # requests that have started and not ended
    job: _Job | None = None
    verdict: Verdict | None = None
    matcher: LLMatcher | None = None
    num_bytes: int = 0  # of the matcher; reserved before it is built
    error: EngineError | None = None  # of a job; not worth remembering

    @property
    def refused(self) -> str:
        return self.verdict.refused if self.verdict is not None else ""

    @property
    def is_settled(self) -> bool:
        """Whether the requests that wait for it can start, or end."""
        return self.matcher is not None or self.error is not None or bool(self.refused)

    @property
    def in_use(self) -> bool:
        return bool(self.waiting) or self.num_running > 0


@dataclass(slots=True)
class _User:
    """A request in the engine."""

    entry: _Entry
    form: StructuredOutputs
    started: bool = False
    matcher: RequestMatcher | None = None


class GrammarCompiler:
    """Owns the grammars of an engine's requests. Its methods belong to the engine's thread."""

    def __init__(
        self, backend: Backend, config: GrammarConfig, clock: Clock = time.thread_time
    ) -> None:
        self.failed: dict[str, EngineError] = {}
        self._backend = backend
        self._config = config
        self._clock = clock
        self._users: dict[str, _User] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._pending: dict[bytes, _Entry] = {}  # not settled, in the order of their arrival
        # That no request uses, least recently used first.
        self._kept: OrderedDict[bytes, _Entry] = OrderedDict()
        self._refused: OrderedDict[bytes, _Entry] = OrderedDict()
        self._jobs: list[_Job] = []
        self._num_bytes = 0
        self._num_changes = 0
        self._num_checks = 0
        self._num_refusals = 0

    # ---- what the scheduler asks -------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        return self._num_changes, sum(job.done.is_set() for job in self._jobs)

    def enter(self, request_id: str, form: StructuredOutputs) -> None:
        key = _key(form)
        entry = self._entries.get(key) or self._open_entry(key, form)
        self._kept.pop(key, None)
        self._refused.pop(key, None)
        entry.waiting.add(request_id)
        self._users[request_id] = _User(entry, form)

    def begin(self) -> None:
        if not self._jobs and not self._pending:
            return
        for entry in list(self._pending.values()):
            if entry.job is not None and entry.job.done.is_set():
                self._take_in(entry, entry.job)
        self._jobs = [job for job in self._jobs if not job.done.is_set()]
        for entry in self._pending.values():
            if entry.job is None and len(self._jobs) < _MAX_JOBS:
                self._advance(entry)

    def ready(self, request_id: str) -> bool:
        user = self._users[request_id]
        entry = user.entry
        if user.started:  # it was preempted; its matcher is still there
            return True
        if entry.error is not None:
            raise entry.error
        if entry.refused:
            raise user.form.error(entry.refused)
        return entry.matcher is not None

    def acquire(self, request_id: str) -> None:
        user = self._users[request_id]
        if not user.started:
            user.started = True
            user.entry.waiting.discard(request_id)
            user.entry.num_running += 1

    def leave(self, request_id: str) -> None:
        user = self._users.pop(request_id)
        entry = user.entry
        self.failed.pop(request_id, None)
        entry.waiting.discard(request_id)
        entry.num_running -= user.started
        if not entry.in_use:
            self._release(entry)

    def stats(self) -> GrammarStats:
        return GrammarStats(
            num_waiting=sum(len(entry.waiting) for entry in self._pending.values()),
            num_grammars=len(self._entries),
            num_bytes=self._num_bytes,
            num_checks=self._num_checks,
            num_refusals=self._num_refusals,
        )

    # ---- what the runner asks ----------------------------------------------------------------

    def matcher(self, request_id: str) -> RequestMatcher:
        """The request's place in its grammar, from its first start until it ends."""
        user = self._users[request_id]
        if user.matcher is None:
            compiled = user.entry.matcher
            assert compiled is not None, "the request has started before its grammar was ready"
            user.matcher = RequestMatcher(
                compiled.deep_copy(),
                step_timeout_s=self._config.grammar_step_timeout,
                on_break=lambda reason: self._broken(request_id, user, reason),
                on_timeout=lambda reason: self._too_slow(request_id, user, reason),
                clock=self._clock,
            )
        return user.matcher

    def _broken(self, request_id: str, user: _User, reason: str) -> None:
        """End a request. Copies share a lexer, which may have reached its limits: renew the entry."""
        self.failed[request_id] = user.form.error(reason)
        old = user.entry
        if self._entries.get(old.key) is not old or old.refused:
            return
        del self._entries[old.key]
        if old.waiting:
            new = self._open_entry(old.key, user.form)
            new.waiting, old.waiting = old.waiting, set()
            for waiting in new.waiting:
                self._users[waiting].entry = new

    def _too_slow(self, request_id: str, user: _User, reason: str) -> None:
        """End a request, and refuse its grammar from now on: it would hold up the others again."""
        self.failed[request_id] = user.form.error(reason)
        user.entry.verdict = Verdict(refused=reason)
        self._num_refusals += 1
        self._num_changes += 1

    # ---- entries -----------------------------------------------------------------------------

    def _open_entry(self, key: bytes, form: StructuredOutputs) -> _Entry:
        entry = self._entries[key] = self._pending[key] = _Entry(key, form)
        return entry

    def _advance(self, entry: _Entry) -> None:
        """Start the next job of an entry, unless the memory for it is not there yet."""
        if entry.verdict is None:
            self._num_checks += 1
            self._start_check(entry)
        else:
            need = min(entry.verdict.num_bytes, self._config.grammar_memory_bytes)
            if self._make_room(need):
                entry.num_bytes = need
                self._num_bytes += need
                self._start_build(entry, entry.verdict)

    def _start_check(self, entry: _Entry) -> None:
        form, ticket = entry.form, Ticket()
        assert form is not None

        def check() -> Callable[[], None]:
            verdict = self._backend.check(form, ticket)
            return lambda: self._checked(entry, verdict)

        self._start(entry, _Job(check, ticket))

    def _start_build(self, entry: _Entry, verdict: Verdict) -> None:
        def build() -> Callable[[], None]:
            matcher = self._backend.build(verdict)
            return lambda: self._built(entry, matcher)

        self._start(entry, _Job(build, Ticket()))

    def _start(self, entry: _Entry, job: _Job) -> None:
        entry.job = job
        self._jobs.append(job)
        job.start()

    def _take_in(self, entry: _Entry, job: _Job) -> None:
        """Note what a job has found."""
        entry.job, entry.error = None, job.error
        if job.take_in is not None:
            job.take_in()
        self._num_changes += 1
        if entry.is_settled:
            del self._pending[entry.key]

    def _checked(self, entry: _Entry, verdict: Verdict) -> None:
        if not verdict.final:
            entry.error = EngineError(f"{verdict.refused} Send the request again later.")
            return
        entry.verdict, entry.form = verdict, None
        self._num_refusals += bool(verdict.refused)

    def _built(self, entry: _Entry, matcher: LLMatcher) -> None:
        entry.matcher = matcher

    def _release(self, entry: _Entry) -> None:
        """Nobody uses an entry any more: keep it, if it may be of use later."""
        self._num_changes += 1
        is_current = self._entries.get(entry.key) is entry
        if is_current and entry.matcher is not None and not entry.refused:
            self._kept[entry.key] = entry
            self._make_room(0)
            return
        if entry.job is not None:
            entry.job.ticket.cancel()
        self._free(entry)
        if is_current and entry.refused:
            self._refused[entry.key] = entry
            if len(self._refused) > _MAX_REFUSED:
                del self._entries[self._refused.popitem(last=False)[0]]
        elif is_current:
            del self._entries[entry.key]
            self._pending.pop(entry.key, None)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop grammars that nobody uses until so many bytes more are within the limit, if possible."""
        most = self._config.grammar_memory_bytes - num_bytes
        while self._kept and (self._num_bytes > most or len(self._kept) > _MAX_KEPT):
            key, entry = self._kept.popitem(last=False)
            del self._entries[key]
            self._free(entry)
        return self._num_bytes <= most

    def _free(self, entry: _Entry) -> None:
        self._num_bytes -= entry.num_bytes
        entry.matcher, entry.num_bytes = None, 0


def _key(form: StructuredOutputs) -> bytes:
    return hashlib.blake2b(json.dumps(form.fields()).encode(), digest_size=32).digest()
