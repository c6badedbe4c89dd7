"""Reads and changes the file of --keys-file: tenants, and the hashes of their keys.

The file is YAML, or JSON if its name ends with .json. keys.py authenticates with its table.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from windlass.config import ServeConfig
from windlass.errors import ConfigError, RequestError
from windlass.folders import find_weakness, writable_by_others
from windlass.serve.batch.database import storage_errors
from windlass.serve.fallback import FallbackMode
from windlass.serve.fields import unknown_field, validation_error
from windlass.serve.problems import ObjectNotFound
from windlass.serve.tenants import Budget, Tenant, TenantKey, TenantTable

_log = logging.getLogger("windlass.serve")

_MAX_FILE_BYTES = 8 * 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
KEY_NAME = re.compile(r"[0-9a-f]{12}")  # names of keys without a keys file
_RESERVED = ("none", "server")  # names of requests without a key, and of the server's own
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HINT = "The file holds SHA-256 hashes: `windlass keys` makes a key and its line for the file."

Count = Annotated[int, Field(ge=1, le=10**12)]
Names = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=1000)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _KeyEntry(_Entry):
    sha256: str
    id: Annotated[str, Field(pattern=_NAME.pattern + "$")] | None = None
    expires: float | None = None

    @field_validator("expires", mode="before")
    @classmethod
    def _read_expires(cls, value: Any) -> Any:
        """A date means its start; a time without an offset is UTC."""
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if value is not None:
            raise ValueError("is not a date such as 2030-01-31 or 2030-01-31T12:00:00Z")
        return value


class _BudgetEntry(_Entry):
    usd: Annotated[float, Field(gt=0)]
    per: Literal["day", "month"]


class _TenantEntry(_Entry):
    """A tenant as the file and PATCH /admin/tenants have it."""

    keys: Annotated[list[_KeyEntry], Field(max_length=1000)]
    weight: Annotated[float, Field(ge=1e-6, le=10**6)] = 1.0  # the scheduler divides by it
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent_requests: Count | None = None
    max_priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    models: Names | None = None
    adapters: Names | None = None
    budget: _BudgetEntry | None = None
    fallback: FallbackMode | None = None
    admin: bool = False
    disabled: bool = False

    @field_validator("models", "adapters", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class KeysFile:
    """A keys file. `config`: of the server now; without its price a budget would never be spent."""

    def __init__(self, path: str, config: ServeConfig) -> None:
        self._path = Path(path).expanduser()
        self.config = config

    @property
    def name(self) -> str:
        return f"--keys-file {self._path}"

    def read(self) -> TenantTable:
        """Read and check the file; raises ConfigError with the tenant and the field."""
        return self._table(self._parse())

    def change(
        self, tenant: str, changes: Mapping[str, Any], *, check: Callable[[TenantTable], None]
    ) -> tuple[dict[str, Any], TenantTable]:
        """Write changed fields of a tenant into the file; None removes a field.

        Returns the fields before that changed, and the new table. Starts from the file as it is now.
        `check` raises RequestError for a table that must not be written.
        """
        document = self._parse()
        table = self._table(document)
        if tenant not in table.tenants:
            raise ObjectNotFound(f"the keys file has no tenant {tenant!r:.100}.")
        for field in changes.keys() - _TenantEntry.model_fields.keys():
            raise unknown_field(field, _TenantEntry.model_fields)
        entry = document["tenants"][tenant]
        before = {field: entry.get(field) for field in changes}
        changed = {**entry, **changes}
        document["tenants"][tenant] = {k: v for k, v in changed.items() if v is not None}
        try:
            table = self._table(document)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        check(table)
        self._write(document)
        return before, table

    # ---- the document ------------------------------------------------------------------------

    def _parse(self) -> dict[str, Any]:
        text = read_private(str(self._path), "--keys-file", _MAX_FILE_BYTES)
        try:
            if self._path.suffix == ".json":
                document = json.loads(text, object_pairs_hook=_without_duplicates)
            else:
                document = yaml.load(text, StrictLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.name} cannot be parsed: {one_line(error)}") from error
        if not isinstance(document, dict) or not isinstance(document.get("tenants"), dict):
            raise ConfigError(
                f"{self.name} has no `tenants:` with a name and fields for each tenant."
            )
        for key in document.keys() - {"tenants"}:
            raise ConfigError(f"{self.name} has the unknown key {key!r:.100}; expected `tenants`.")
        return document

    def _table(self, document: dict[str, Any]) -> TenantTable:
        table = TenantTable()
        for name, fields in document["tenants"].items():
            where = f"{self.name}: tenant {name!r:.100}"
            _check_name(name, where)
            entry = _read_entry(fields, where)
            values = {field: getattr(entry, field) for field in Tenant.__slots__ if field != "name"}
            if entry.budget is not None:
                self._check_budget(where)
                values["budget"] = Budget(usd=entry.budget.usd, per=entry.budget.per)
            table.tenants[name] = Tenant(name=name, **values)
            _add_keys(table, entry.keys, name, where)
        if not table.keys:
            raise ConfigError(f"{self.name} has no key: no request could be authenticated.")
        return table

    def _check_budget(self, where: str) -> None:
        config = self.config
        if not config.price_per_hour:
            raise ConfigError(
                f"{where}: a budget needs --price-per-hour above 0, which costs come from."
            )
        if config.usage_db is None and config.data_dir is None:
            raise ConfigError(
                f"{where}: a budget needs --usage-db FILE or --data-dir FOLDER, where the costs are "
                "kept over restarts."
            )

    def _write(self, document: dict[str, Any]) -> None:
        """Replace the file as a whole; comments in it are lost."""
        path = self._path.resolve()  # a link stays one
        if path.suffix == ".json":
            text = json.dumps(document, indent=2) + "\n"
        else:
            text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        with storage_errors(path):
            descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise


class StrictLoader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without keys that are given twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)[:100]
            if name in names:
                raise yaml.MarkedYAMLError(
                    problem=f"{name!r} is given twice", problem_mark=key.start_mark
                )
            names.add(name)
        return super().construct_mapping(node, deep)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:100]!r} is given twice")
        found[name] = value
    return found


def one_line(error: Exception) -> str:
    """The problem and its place, without the text of the file, which may have a key in it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}."
    return " ".join(str(error).split()) + "."


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: a name has up to 64 letters, digits and ._@- (in YAML, quote a number)."
        )
    if name in _RESERVED or KEY_NAME.fullmatch(name):
        raise ConfigError(f"{where}: this name is reserved; choose another one.")


def _read_entry(fields: Any, where: str) -> _TenantEntry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected fields such as `keys:` and `weight:`.")
    keys = fields.get("keys")
    for index, key in enumerate(keys if isinstance(keys, list) else ()):
        digest = key.get("sha256") if isinstance(key, dict) else None
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            # Without the value, which may be a key.
            raise ConfigError(f"{where}: keys.{index} has no sha256 of 64 hex digits. {_HINT}")
        for name in key.keys() - _KeyEntry.model_fields.keys():
            raise ConfigError(f"{where}: keys.{index}: unknown field {name!r:.100}. {_HINT}")
    for name in fields.keys() - _TenantEntry.model_fields.keys():
        raise ConfigError(f"{where}: {unknown_field(str(name), _TenantEntry.model_fields)}")
    try:
        return _TenantEntry.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{where}: {validation_error(error)}") from error


def _add_keys(table: TenantTable, keys: list[_KeyEntry], tenant: str, where: str) -> None:
    ids: set[str] = set()
    for index, key in enumerate(keys):
        other, key_id = table.keys.get(key.sha256), key.id or key.sha256[:12]
        if other is not None:
            raise ConfigError(f"{where}: keys.{index}: tenant {other.tenant!r} has the same key.")
        if key_id in ids:
            raise ConfigError(
                f"{where}: keys.{index}: another key of this tenant has the id {key_id!r}."
            )
        ids.add(key_id)
        table.keys[key.sha256] = TenantKey(id=key_id, tenant=tenant, expires=key.expires)


def _check_private(path: Path, status: os.stat_result, name: str) -> None:
    """Raise ConfigError if another user could have written the open file, or could replace it."""
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{name} can be written by other users. Run: chmod 600 {path}")
    if (problem := writable_by_others(status)) is not None:
        raise ConfigError(f"{name} {problem}. Run: chown {os.geteuid()} {path}")
    found = find_weakness(path)
    if found is not None:
        above, problem = found
        raise ConfigError(
            f"{name}: {above} {problem}, and could put another file in its place. Run: chmod go-w "
            f"{above}, or move the keys to a folder of your own."
        )


def read_private(path: str, flag: str, max_bytes: int) -> str:
    """Read a file of keys; raises ConfigError if others can write or replace it, or it is too large."""
    name = f"{flag} {path}"
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(max_bytes + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}.") from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{name} is larger than {max_bytes} bytes: not a file of keys.")
    _check_private(Path(path), status, name)
    if status.st_mode & stat.S_IROTH:
        _log.warning("%s can be read by other users; chmod 600 keeps the keys secret", name)
    return text
