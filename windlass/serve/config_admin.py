"""Changes of settings while the server runs: checked as at start, applied whole, and recorded.

All settings are in config.py; those marked live can change. Lives in the server's process, which
sends the result to the HTTP workers and the engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.config import EngineConfig, SchedulerConfig, ServeConfig, check_slo, flag
from windlass.core.limits import EngineCaps, SloTimes, check_whole_prompts_fit
from windlass.errors import ConfigError, RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.handle import EngineHandle
from windlass.serve.live_config import LiveConfig, StartConfig
from windlass.serve.logs import set_log_level
from windlass.serve.messages import Configure
from windlass.serve.problems import ConfigConflict
from windlass.settings import checked, describe, live_fields, unknown_option

_log = logging.getLogger("windlass.serve")

MAX_PATCH_BYTES = 64 * 2**10
_MAX_KEPT = 100  # changes in memory
_MAX_FILE_BYTES = 4 * 2**20  # of the history; the file before is kept, too
_MAX_LABEL_CHARS = 64
_FILE_NAME = "config-history.jsonl"

_ENGINE_SECTIONS: dict[str, Any] = get_type_hints(EngineConfig)
_SECTIONS: dict[str, Any] = {"serve": ServeConfig, **_ENGINE_SECTIONS}
_SECTION_OF = {item.name: key for key, each in _SECTIONS.items() for item in fields(each)}
LIVE = {item.name: item for each in _SECTIONS.values() for item in live_fields(each)}


def config_hints() -> dict[str, tuple[Any, str]]:
    """The type and the help text of each live setting."""
    return {
        name: (get_type_hints(_SECTIONS[_SECTION_OF[name]])[name], item.metadata["help"])
        for name, item in LIVE.items()
    }


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """One change: the settings that differ now, with their old and new values."""

    version: int
    at: str
    by: str
    changes: dict[str, dict[str, Any]]  # {"max_num_queued_reqs": {"from": 1024, "to": 8}}


class ConfigAdmin:
    """Owns the values of all settings, their version, and the history of changes.

    The version counts the changes since the start. `check` raises RequestError for a config that the
    tenants cannot have. One event loop calls all methods.
    """

    def __init__(
        self,
        live: LiveConfig,
        started: StartConfig,
        client: EngineHandle,
        *,
        check: Callable[[ServeConfig], None],
    ) -> None:
        self._live = live
        self._check = check
        self._client = client
        self._started = self._engine = started.engine
        self._sources = dict(started.sources)
        self._version = 0
        self.num_changes = dict.fromkeys(LIVE, 0)  # by setting
        folder = live.value.data_dir
        self.history = ConfigHistory(None if folder is None else Path(folder).expanduser())

    @property
    def version(self) -> int:
        return self._version

    def describe(self) -> dict[str, Any]:
        """All settings with their values, sources, and whether they can change now."""
        values = self._values(self._sections())
        return {
            "version": self._version,
            "settings": {
                item.name: describe(
                    item, values[item.name], self._sources.get(item.name, "default")
                )
                for section in _SECTIONS.values()
                for item in fields(section)
            },
        }

    def live_values(self) -> dict[str, Any]:
        values = self._values(self._sections())
        return {name: values[name] for name in LIVE}

    def _values(self, sections: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all settings; those that are not set are the engine's, where it has some."""
        values = {name: getattr(sections[key], name) for name, key in _SECTION_OF.items()}
        defaults = {**self._bounds(), "slo_tpot_ms": self._client.report.default_tpot_ms}
        for name, default in defaults.items():
            if values[name] is None:
                values[name] = default
        return values

    def _sections(self) -> dict[str, Any]:
        engine = {key: getattr(self._engine, key) for key in _ENGINE_SECTIONS}
        return {"serve": self._live.value, **engine}

    def change(
        self, given: Mapping[str, Any], *, by: str, version: int | None = None
    ) -> ConfigChange:
        """Change all of the settings in `given` or, if one is wrong, none.

        `version`: the version that the caller has seen. `by`: the name of who changes them.
        """
        if version is not None and version != self._version:
            raise ConfigConflict(
                f"the config has version {self._version}, and the request is for version {version}: it "
                "was changed meanwhile. Read it again with GET /admin/config."
            )
        values, sections = _converted(given), self._sections()
        new = {key: _replaced(section, key, values) for key, section in sections.items()}
        before, after = self._values(sections), self._values(new)
        changes = {
            name: {"from": before[name], "to": after[name]}
            for name in values
            if before[name] != after[name]
        }
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        engine = EngineConfig(**{key: new[key] for key in _ENGINE_SECTIONS})
        if engine != self._engine:
            self._check_engine(engine, changes)
        if changes:
            self._check(new["serve"])
            _check_slo(new["serve"], engine.scheduler, changes)
        if not changes:
            return ConfigChange(self._version, at, by, changes)
        self._version += 1
        self._sources |= dict.fromkeys(changes, "live")
        for name in changes:
            self.num_changes[name] += 1
        self._engine = engine
        self._live.set(new["serve"])
        if "log_level" in changes:
            set_log_level(new["serve"].log_level)
        self._configure_engines()
        change = ConfigChange(self._version, at, by, changes)
        self._log(change)
        self.history.add(change)
        return change

    def _check_engine(self, engine: EngineConfig, changes: Collection[str]) -> None:
        """Raise RequestError if engines that were built with other limits cannot have these."""
        bounds, scheduler = self._bounds(), engine.scheduler
        for name, bound in bounds.items():
            value = getattr(getattr(engine, _SECTION_OF[name]), name)
            if value is not None and value > bound:
                raise RequestError(
                    f"{name} must be between 1 and {bound}, with which the engine was started; got "
                    f"{value}. To raise it further, start the server with {flag(name)}.",
                    name,
                )
        if "max_num_seqs" in changes and scheduler.batching != "continuous":
            raise RequestError(
                f"max_num_seqs does nothing with --batching {scheduler.batching}.", "max_num_seqs"
            )
        max_tokens = scheduler.max_num_batched_tokens or bounds["max_num_batched_tokens"]
        resolved = replace(
            scheduler,
            max_num_seqs=scheduler.max_num_seqs or bounds["max_num_seqs"],
            max_num_batched_tokens=max_tokens,
        )
        try:
            replace(engine, scheduler=resolved).limits("cpu")
            if not scheduler.enable_chunked_prefill:
                check_whole_prompts_fit(max_tokens, self._client.report.max_model_len)
        except ConfigError as error:
            raise RequestError(str(error), "max_num_batched_tokens") from error

    def _bounds(self) -> dict[str, int]:
        """What the engines were built for: the highest values of their limits."""
        report, speculation = self._client.report, self._started.speculation
        bounds = {
            "max_num_seqs": report.max_num_seqs,
            "max_num_batched_tokens": report.max_num_batched_tokens,
        }
        if speculation.spec != "none":
            bounds["spec_tokens"] = speculation.max_draft_tokens
        return bounds

    def _configure_engines(self) -> None:
        serve, scheduler = self._live.value, self._engine.scheduler
        speculation = self._engine.speculation
        caps = EngineCaps(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_draft_tokens=speculation.max_draft_tokens if speculation.spec_enabled else 0,
            slo=SloTimes.of(
                ttft_ms=scheduler.slo_ttft_ms,
                tpot_ms=self._values(self._sections())["slo_tpot_ms"],
            ),
        )
        settings = Configure(caps=caps, hang_timeout=serve.hang_timeout, log_level=serve.log_level)
        self._client.configure(settings, serve.retry_on_restart)

    def _log(self, change: ConfigChange) -> None:
        text = ", ".join(
            f"{name} from {_text(each['from'])} to {_text(each['to'])}"
            for name, each in change.changes.items()
        )
        record = {"version": change.version, "by": change.by, "changes": change.changes}
        _log.info(
            "config version %d, by %s: %s",
            change.version,
            change.by,
            text,
            extra={"fields": record},
        )


def _converted(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values by setting, with their types; raises RequestError for a bad name or type."""
    values: dict[str, Any] = {}
    for spelt, value in given.items():
        name = spelt.replace("-", "_")
        if name not in _SECTION_OF:
            raise RequestError(unknown_option(spelt, sorted(LIVE)), spelt)
        if name not in LIVE:
            raise RequestError(
                f"{name} cannot change while the server runs; start it with {flag(name)}. These "
                f"can: {', '.join(sorted(LIVE))}.",
                name,
            )
        if name in values:
            raise RequestError(f"{name} is given twice, with - and with _.", name)
        values[name] = _convert(name, value)
    return values


def _convert(name: str, value: Any) -> Any:
    section = _SECTIONS[_SECTION_OF[name]]
    try:
        return msgspec.convert(checked(section, name, value), get_type_hints(section)[name])
    except ConfigError as error:
        raise RequestError(str(error), name) from error
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(f"{name}: {error}; got {abbreviate(value)}.", name) from error


def _replaced(section: Any, key: str, values: Mapping[str, Any]) -> Any:
    """The section with its new values. Its own checks run, as at start."""
    own = {name: value for name, value in values.items() if _SECTION_OF[name] == key}
    if not own:
        return section
    try:
        return replace(section, **own)
    except ConfigError as error:
        named = next((name for name in own if flag(name) in str(error)), None)
        raise RequestError(str(error), named) from error


def _check_slo(serve: ServeConfig, scheduler: SchedulerConfig, changes: Collection[str]) -> None:
    try:
        check_slo(serve, scheduler)
    except ConfigError as error:
        named = next((name for name in changes if flag(name) in str(error)), None)
        raise RequestError(str(error), named) from error


def _text(value: Any) -> str:
    """A value for a line of the log, or a label."""
    return msgspec.json.encode(value).decode()[:_MAX_LABEL_CHARS]


class ConfigHistory:
    """The last changes. With a folder, also a file there, which later servers continue."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / _FILE_NAME
        self.entries: deque[Any] = deque(self._stored(), maxlen=_MAX_KEPT)  # the latest last
        self._unsaved: list[bytes] = []
        self._lock = asyncio.Lock()

    def _stored(self) -> Iterator[Any]:
        if self._path is None or not self._path.is_file():
            return
        for line in self._path.read_bytes().splitlines():
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError:  # cut off when the disk was full
                _log.warning("%s has a line that is not JSON: %.80r", self._path, line)

    def add(self, change: ConfigChange) -> None:
        self.entries.append(change)
        if self._path is not None:
            self._unsaved.append(msgspec.json.encode(change) + b"\n")

    async def save(self) -> None:
        """Append new changes to the file. A change is in effect and in the log also if this fails."""
        async with self._lock:
            text, self._unsaved = b"".join(self._unsaved), []
            if self._path is None or not text:
                return
            try:
                await asyncio.to_thread(_append, self._path, text)
            except OSError as error:
                _log.error("%s: a change could not be recorded: %s", self._path, error)


def _append(path: Path, text: bytes) -> None:
    if path.is_file() and path.stat().st_size + len(text) > _MAX_FILE_BYTES:
        path.replace(path.with_suffix(".old.jsonl"))
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(handle, "ab") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class ConfigMetrics(Collector):
    """The live settings as metrics, read when they are rendered."""

    def __init__(self, admin: ConfigAdmin, model_name: str) -> None:
        self._admin = admin
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        label, model = "model_name", self._model
        version = GaugeMetricFamily(
            "windlass:config_version", "Changes of the config since the start.", labels=[label]
        )
        version.add_metric([model], self._admin.version)
        changes = CounterMetricFamily(
            "windlass:config_changes", "Changes of a setting.", labels=[label, "setting"]
        )
        values = GaugeMetricFamily(
            "windlass:live_config_info",
            "1 for the value, as JSON, of each setting that can change while the server runs.",
            labels=[label, "setting", "value"],
        )
        for name, value in self._admin.live_values().items():
            changes.add_metric([model, name], self._admin.num_changes[name])
            values.add_metric([model, name, _text(value)], 1)
        yield from (version, changes, values)
