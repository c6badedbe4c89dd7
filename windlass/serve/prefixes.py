"""Named prefixes: prompts whose KV blocks every engine keeps, such as a system prompt.

An engine pins blocks that it has cached (core/pins.py). This module has it compute what is missing, and
does so again for an engine that starts with an empty cache: after a crash, a wake, or a restart of the
server, whose names a file in --data-dir keeps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Timeline
from windlass.errors import ConfigError, EngineError, Overloaded, RequestError, WorkerDied
from windlass.serve.handle import EngineHandle, EngineReplica
from windlass.serve.problems import ObjectNotFound, PrefixConflict, StorageError

_log = logging.getLogger("windlass.serve")

MAX_PREFIXES = 1024
_MAX_TRIES = 3  # of a prefix whose blocks are evicted before they are pinned
_RETRY_S = 5.0
_FILE_NAME = "kv-prefixes.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrefix:
    """A prompt and all that its block hashes depend on. `model`: the served model's name."""

    name: str
    model: str
    tokens: list[int]
    cache_salt: str = ""
    adapter: str = ""
    deterministic: bool = False
    tenant: str = ""
    pin: bool = True  # False: only KV tiers keep it
    created: int = field(default_factory=lambda: int(time.time()))

    def request(self, request_id: str) -> NewRequest:
        """The request that computes the prefix and outputs nothing."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=0, ignore_eos=True, deterministic=self.deterministic
        )
        return NewRequest(
            request_id,
            self.tokens,
            sampling,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            tenant=self.tenant,
        )

    def keeps_the_same(self, other: NamedPrefix) -> bool:
        return self.request("") == other.request("") and self.pin == other.pin


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """What one replica keeps of a prefix, and how many tokens it found and computed for it."""

    replica: int
    num_tokens: int
    num_blocks: int
    cached_tokens: int
    computed_tokens: int


class PrefixFile:
    """The names of this server's prefixes; a file without a folder is not written."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE_NAME

    def read(self) -> list[NamedPrefix]:
        if self._path is None or not self._path.is_file():
            return []
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[NamedPrefix])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{self._path}: the named prefixes cannot be read: {error}. Remove the file, and save "
                "them again."
            ) from error

    async def write(self, prefixes: list[NamedPrefix]) -> None:
        if self._path is not None:
            try:
                await asyncio.to_thread(_replace, self._path, msgspec.json.encode(prefixes))
            except OSError as error:
                raise StorageError(
                    f"{self._path}: the prefix is in use, but a restarted server will not know it: {error}."
                ) from error


def _replace(path: Path, text: bytes) -> None:
    """Replace a private file as a whole."""
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


class NamedPrefixes:
    """Owns the names of a server. One change at a time; one event loop calls all methods."""

    def __init__(self, client: EngineHandle, model: str, file: PrefixFile) -> None:
        self._client = client
        self._file = file
        stored = file.read()
        self._prefixes = {each.name: each for each in stored if each.model == model}
        self._foreign = [each for each in stored if each.model != model]
        self._pinned: dict[str, dict[int, PinReport]] = {}  # by name and replica
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._restoring: dict[int, asyncio.Task[None]] = {}
        client.on_cache_empty = self._on_cache_empty

    def entries(self) -> list[dict[str, Any]]:
        """All prefixes as JSON, in the order in which they were saved."""
        return [self._entry(each) for each in self._prefixes.values()]

    def _entry(self, prefix: NamedPrefix) -> dict[str, Any]:
        pinned = self._pinned.get(prefix.name, {})
        return {
            "object": "kv.prefix",
            "name": prefix.name,
            "model": prefix.adapter or prefix.model,
            "tenant": prefix.tenant,
            "created": prefix.created,
            "pin": prefix.pin,
            "num_prompt_tokens": len(prefix.tokens),
            "replicas": [asdict(pinned[index]) for index in sorted(pinned)],
        }

    async def save(self, prefix: NamedPrefix) -> dict[str, Any]:
        """Compute and pin a prefix on all replicas that are up, or on none; saving it twice is no error."""
        async with self._lock:
            known = self._prefixes.get(prefix.name)
            if known is not None and not known.keeps_the_same(prefix):
                raise PrefixConflict(
                    f"the name {prefix.name!r} belongs to a prefix of {len(known.tokens):,} other tokens, or of "
                    "another model, tenant, cache_salt or pin. Delete it first, or choose another name.",
                    "name",
                )
            if known is None and len(self._prefixes) >= MAX_PREFIXES:
                raise RequestError(
                    f"there are {MAX_PREFIXES:,} named prefixes, which is the most. Delete one first.",
                    "name",
                )
            try:
                await self._pin_on_all(known or prefix)
            except BaseException:
                if known is None:
                    await self._unpin(prefix.name)
                raise
            self._prefixes.setdefault(prefix.name, prefix)
            if known is None:
                await self._write()
            return self._entry(self._prefixes[prefix.name])

    async def load(self, name: str) -> dict[str, Any]:
        """Pin a prefix where it is not pinned, for example after an error of its restoration."""
        async with self._lock:
            prefix = self._get(name)
            await self._pin_on_all(prefix)
            return self._entry(prefix)

    async def delete(self, name: str) -> dict[str, Any]:
        """Forget a name. Its blocks stay cached until they are evicted."""
        async with self._lock:
            self._get(name)
            num_blocks = await self._unpin(name)
            del self._prefixes[name]
            await self._write()
            return {"name": name, "deleted": True, "num_blocks": num_blocks}

    def _get(self, name: str) -> NamedPrefix:
        if name not in self._prefixes:
            some = ", ".join(map(repr, list(self._prefixes)[:8])) or "none"
            raise ObjectNotFound(
                f"there is no prefix {name!r:.200}. Saved are: {some} (GET /admin/kv).", "name"
            )
        return self._prefixes[name]

    async def _write(self) -> None:
        await self._file.write([*self._prefixes.values(), *self._foreign])

    # ---- engines -----------------------------------------------------------------------------

    async def _pin_on_all(self, prefix: NamedPrefix) -> None:
        up = [each for each in self._client.replicas if each.health().ok]
        if not up:
            raise WorkerDied(f"{self._client.health().reason}. Try again in a moment.")
        results = await asyncio.gather(
            *(self._pin_on(each, prefix) for each in up), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _pin_on(self, replica: EngineReplica, prefix: NamedPrefix) -> None:
        """Have a replica compute what it lacks of the prefix, and pin it."""
        num_cached = num_computed = 0
        for _ in range(_MAX_TRIES):
            number = next(self._numbers)
            request = prefix.request(f"prefix-{replica.index}-{number}")
            pinned = await replica.pin_prefix(prefix.name, request, prefix.pin)
            if not pinned.num_missing:
                self._pinned.setdefault(prefix.name, {})[replica.index] = PinReport(
                    replica=replica.index,
                    num_tokens=pinned.num_tokens,
                    num_blocks=pinned.num_blocks,
                    cached_tokens=num_cached or max(0, pinned.num_tokens - num_computed),
                    computed_tokens=num_computed,
                )
                return
            line = await _compute(replica, request)
            num_cached, num_computed = line.num_cached, line.num_prompt - line.num_cached
        raise Overloaded(
            f"the prefix {prefix.name!r} was computed {_MAX_TRIES} times, and its {len(prefix.tokens):,} tokens "
            "were evicted before they were pinned: the KV cache is too full. Try again later.",
            _RETRY_S,
        )

    async def _unpin(self, name: str) -> int:
        """Release a prefix on all replicas that are up; others have lost it."""
        self._pinned.pop(name, None)
        up = [each for each in self._client.replicas if each.health().ok]
        return sum(await asyncio.gather(*(each.unpin_prefix(name) for each in up)))

    def _on_cache_empty(self, index: int) -> None:
        """An engine is ready, and its KV cache is empty."""
        for pinned in self._pinned.values():
            pinned.pop(index, None)
        if self._prefixes:
            if index in self._restoring:
                self._restoring[index].cancel()
            self._restoring[index] = asyncio.create_task(self._restore(index))

    async def _restore(self, index: int) -> None:
        replica = self._client.replicas[index]
        for name in list(self._prefixes):
            async with self._lock:
                prefix = self._prefixes.get(name)
                if prefix is None or index in self._pinned.get(name, {}):
                    continue
                try:
                    await self._pin_on(replica, prefix)
                except EngineError as error:
                    _log.error(
                        "replica %d: the prefix %r was not loaded: %s POST /admin/kv/load tries again.",
                        index,
                        name,
                        error,
                    )

    def close(self) -> None:
        for task in self._restoring.values():
            task.cancel()


async def _compute(replica: EngineReplica, request: NewRequest) -> Timeline:
    line = Timeline()
    async with aclosing(replica.generate(request, tracked=True)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise output.exception()
            line = output.timeline or line
    return line
