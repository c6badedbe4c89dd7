"""Compiles the grammars of an engine's requests concurrently with steps, and caches them.

Threads check a grammar in the sandbox and then build it in this process; the engine's thread only
collects results. Equal grammars share one entry. Unused entries stay in two LRU caches, one for
built and one for refused grammars.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.core.types import GrammarFailure, GrammarStats
from windlass.errors import EngineError, Overloaded
from windlass.text.grammar.matchers import BuiltGrammars
from windlass.text.grammar.sandbox import Cancellation, Verdict

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_JOBS = 4  # concurrent; each may use the memory of one grammar
_MAX_KEPT = 256  # built grammars that no request uses
_MAX_REFUSED = 1024
_STACK_BYTES = 16 * 2**20  # of builder threads: eight times the sandbox's stack


class Backend(Protocol):
    """Checks and builds grammars. Its methods block."""

    def check(self, structured: StructuredOutputs, cancellation: Cancellation) -> Verdict: ...

    def build(self, grammar: str) -> LLMatcher: ...

    def close(self) -> None: ...


class _Job:
    """Work in its own thread. The engine's thread calls `apply`, the function that the work returns."""

    def __init__(self, work: Callable[[], Callable[[], None]], cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self.apply: Callable[[], None] | None = None
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
            self.apply = self._work()
        except EngineError as error:
            self.error = error
        except Exception as error:  # border of the thread: the waiting requests report it
            self.error = EngineError(f"{type(error).__name__}: {error}")
        finally:
            self.done.set()


@dataclass(slots=True, eq=False)
class _Entry:
    """One grammar and its state: pending, checked, then refused or built."""

    key: bytes
    structured: StructuredOutputs | None  # None: already checked
    waiting: set[str] = field(default_factory=set)  # queued requests
    num_running: int = 0  # running requests
    job: _Job | None = None
    verdict: Verdict | None = None
    matcher: LLMatcher | None = None
    num_bytes: int = 0  # of the matcher; reserved before the build
    error: EngineError | None = None  # of a failed job; not cached

    @property
    def refused(self) -> str:
        return self.verdict.refused if self.verdict is not None else ""

    @property
    def is_settled(self) -> bool:
        """Whether waiting requests can start, or must fail."""
        return self.matcher is not None or self.error is not None or bool(self.refused)

    @property
    def in_use(self) -> bool:
        return bool(self.waiting) or self.num_running > 0


@dataclass(slots=True)
class _User:
    """A request in the engine."""

    entry: _Entry
    structured: StructuredOutputs
    started: bool = False
    grammar: str = ""  # set when it starts


class GrammarCompiler:
    """Owns the grammars of an engine's requests. Only the engine's thread may call it."""

    def __init__(self, backend: Backend, config: GrammarConfig) -> None:
        self.built = BuiltGrammars(backend.build)  # for a runner in the same process
        self._backend = backend
        self._config = config
        self._users: dict[str, _User] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._pending: dict[bytes, _Entry] = {}  # not settled, in order of arrival
        # Unused entries, least recently used first.
        self._kept: OrderedDict[bytes, _Entry] = OrderedDict()
        self._refused: OrderedDict[bytes, _Entry] = OrderedDict()
        self._jobs: list[_Job] = []
        self._num_bytes = 0
        self._num_changes = 0
        self._num_checks = 0
        self._num_refusals = 0

    def close(self) -> None:
        """End the sandbox. The next grammar starts another one."""
        self._backend.close()

    # ---- called by the scheduler -------------------------------------------------------------

    @property
    def state(self) -> tuple[int, int]:
        return self._num_changes, sum(job.done.is_set() for job in self._jobs)

    def enter(self, request_id: str, structured: StructuredOutputs) -> None:
        key = _key(structured)
        entry = self._entries.get(key) or self._open_entry(key, structured)
        self._kept.pop(key, None)
        self._refused.pop(key, None)
        entry.waiting.add(request_id)
        self._users[request_id] = _User(entry, structured)

    def begin(self) -> None:
        if not self._jobs and not self._pending:
            return
        for entry in list(self._pending.values()):
            if entry.job is not None and entry.job.done.is_set():
                self._apply(entry, entry.job)
        self._jobs = [job for job in self._jobs if not job.done.is_set()]
        for entry in self._pending.values():
            if entry.job is None and len(self._jobs) < _MAX_JOBS:
                self._advance(entry)

    def ready(self, request_id: str) -> bool:
        user = self._users[request_id]
        entry = user.entry
        if user.started:  # preempted: it still has its matcher
            return True
        if entry.error is not None:
            raise entry.error
        if entry.refused:
            raise user.structured.error(entry.refused)
        return entry.matcher is not None

    def acquire(self, request_id: str) -> str:
        user = self._users[request_id]
        assert user.entry.verdict is not None, "the request started before its grammar was ready"
        if not user.started:
            user.grammar = user.entry.verdict.grammar
            user.started = True
            user.entry.waiting.discard(request_id)
            user.entry.num_running += 1
        return user.grammar

    def leave(self, request_id: str) -> None:
        user = self._users.pop(request_id)
        entry = user.entry
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

    def fail(self, failure: GrammarFailure) -> EngineError:
        user = self._users[failure.request_id]
        if failure.too_slow:
            self._refuse(user.entry, failure.reason)
        else:
            self._compile_again(user)
        return user.structured.error(failure.reason)

    def _compile_again(self, user: _User) -> None:
        """Replace a broken grammar: copies share a lexer that may have reached its limits."""
        old = user.entry
        if self._entries.get(old.key) is not old or old.refused:
            return
        del self._entries[old.key]
        if old.matcher is not None:
            self.built.drop(user.grammar, old.matcher)
        if old.waiting:
            new = self._open_entry(old.key, user.structured)
            new.waiting, old.waiting = old.waiting, set()
            for waiting in new.waiting:
                self._users[waiting].entry = new

    def _refuse(self, entry: _Entry, reason: str) -> None:
        """Refuse a grammar from now on: it would delay other requests again."""
        entry.verdict = replace(entry.verdict or Verdict(), refused=reason)
        self._num_refusals += 1
        self._num_changes += 1

    # ---- entries -----------------------------------------------------------------------------

    def _open_entry(self, key: bytes, structured: StructuredOutputs) -> _Entry:
        entry = self._entries[key] = self._pending[key] = _Entry(key, structured)
        return entry

    def _advance(self, entry: _Entry) -> None:
        """Start an entry's next job, unless there is no memory for it yet."""
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
        structured, cancellation = entry.structured, Cancellation()
        assert structured is not None

        def check() -> Callable[[], None]:
            verdict = self._backend.check(structured, cancellation)
            return lambda: self._checked(entry, verdict)

        self._start(entry, _Job(check, cancellation))

    def _start_build(self, entry: _Entry, verdict: Verdict) -> None:
        def build() -> Callable[[], None]:
            matcher = self._backend.build(verdict.grammar)
            return lambda: self._built(entry, matcher)

        self._start(entry, _Job(build, Cancellation()))

    def _start(self, entry: _Entry, job: _Job) -> None:
        entry.job = job
        self._jobs.append(job)
        job.start()

    def _apply(self, entry: _Entry, job: _Job) -> None:
        """Apply the result of a finished job."""
        entry.job, entry.error = None, job.error
        if job.apply is not None:
            job.apply()
        self._num_changes += 1
        if entry.is_settled:
            del self._pending[entry.key]

    def _checked(self, entry: _Entry, verdict: Verdict) -> None:
        if not verdict.final:
            entry.error = Overloaded(
                f"the grammar waits for a busy machine: {verdict.refused} Send the request again later.",
                retry_after_s=self._config.grammar_compile_timeout,
            )
            return
        entry.verdict, entry.structured = verdict, None
        self._num_refusals += bool(verdict.refused)

    def _built(self, entry: _Entry, matcher: LLMatcher) -> None:
        assert entry.verdict is not None
        entry.matcher = matcher
        self.built.add(entry.verdict.grammar, matcher)

    def _release(self, entry: _Entry) -> None:
        """Cache or drop an entry that no request uses."""
        self._num_changes += 1
        is_current = self._entries.get(entry.key) is entry
        if is_current and entry.matcher is not None and not entry.refused:
            self._kept[entry.key] = entry
            self._make_room(0)
            return
        if entry.job is not None:
            entry.job.cancellation.cancel()
        self._free(entry)
        if is_current and entry.refused:
            self._refused[entry.key] = entry
            if len(self._refused) > _MAX_REFUSED:
                del self._entries[self._refused.popitem(last=False)[0]]
        elif is_current:
            del self._entries[entry.key]
            self._pending.pop(entry.key, None)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict unused grammars until `num_bytes` more fit the limit. Returns whether they fit."""
        limit = self._config.grammar_memory_bytes - num_bytes
        while self._kept and (self._num_bytes > limit or len(self._kept) > _MAX_KEPT):
            key, entry = self._kept.popitem(last=False)
            del self._entries[key]
            self._free(entry)
        return self._num_bytes <= limit

    def _free(self, entry: _Entry) -> None:
        if entry.matcher is not None and entry.verdict is not None:
            self.built.drop(entry.verdict.grammar, entry.matcher)
        self._num_bytes -= entry.num_bytes
        entry.matcher, entry.num_bytes = None, 0


def _key(structured: StructuredOutputs) -> bytes:
    return hashlib.blake2b(json.dumps(structured.fields()).encode(), digest_size=32).digest()
