"""The endpoints of files and batches, in OpenAI's format."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from windlass.errors import RequestError
from windlass.serve.abbreviate import abbreviate
from windlass.serve.batch.database import storage_errors
from windlass.serve.batch.results import Counts, publish
from windlass.serve.batch.service import BatchService
from windlass.serve.batch.store import BatchRecord, FileRecord, Page
from windlass.serve.batch.upload import Upload, read_upload
from windlass.serve.bodies import read_as, reply
from windlass.serve.hosts import check_origin
from windlass.serve.problems import Busy, StorageError
from windlass.serve.protocol import Body
from windlass.serve.services import Services

_PURPOSE = "batch"
_MAX_FILES_PER_PAGE = 10_000
_MAX_BATCHES_PER_PAGE = 100
_DEFAULT_BATCHES_PER_PAGE = 20
_MIN_LIFETIME_S, _MAX_LIFETIME_S = 3_600, 30 * 86_400
_WINDOW = re.compile(r"([1-9]\d{0,2})([hd])")
_UNIT_S = {"h": 3_600, "d": 86_400}


class ExpiresAfter(BaseModel):
    """When a file is deleted, counted from its creation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_MIN_LIFETIME_S, le=_MAX_LIFETIME_S)]


class CreateBatchRequest(Body):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        """The completion window: 24h, as OpenAI has it, or another number of hours or days."""
        found = _WINDOW.fullmatch(self.completion_window)
        if found is None:
            raise RequestError(
                f"completion_window must be a number of hours or days, such as 24h, got "
                f"{abbreviate(self.completion_window)}.",
                "completion_window",
            )
        return int(found[1]) * _UNIT_S[found[2]]


class _Stored:
    """What both kinds of endpoints use."""

    def __init__(self, services: Services) -> None:
        self._services = services

    @property
    def _batches(self) -> BatchService:
        if self._services.batches is None:
            raise RequestError("this server keeps no files. Start it with --data-dir FOLDER.")
        return self._services.batches

    def _owner(self, request: Request) -> str:
        return self._services.keys.tenant_of(request).name


class FileRoutes(_Stored):
    """The endpoints under /v1/files."""

    async def upload(self, request: Request) -> Response:
        config, store = self._services.config, self._batches.store
        check_origin(request, config.allowed_origins)
        limit = config.max_data_bytes
        if await store.num_bytes() > limit:
            raise StorageError(f"the files take more than {limit:,} bytes (--max-data-bytes).")
        file_id, partial = store.new_upload()
        path = store.path_of(file_id)
        try:
            upload = await read_upload(request, partial, config.max_file_bytes)
            record = self._record(upload, file_id, self._owner(request))
            with storage_errors(path):
                await asyncio.to_thread(publish, partial, path)
            try:
                await store.add_file(record)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        finally:
            with suppress(OSError):  # remove_orphans comes back to it
                partial.unlink(missing_ok=True)
        return reply(record.json())

    def _record(self, upload: Upload, file_id: str, owner: str) -> FileRecord:
        fields, now = upload.fields, self._batches.store.now()
        purpose = fields.get("purpose")
        if purpose != _PURPOSE:
            got = "is missing" if purpose is None else f"is {abbreviate(purpose)}"
            raise RequestError(
                f"purpose {got}; files for batches have the purpose 'batch'.", "purpose"
            )
        known = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}
        for name in fields.keys() - known:
            raise RequestError(f"unknown field {abbreviate(name)}.", name[:100])
        lifetime_s = _lifetime(fields)
        return FileRecord(
            id=file_id,
            owner=owner,
            filename=upload.filename,
            purpose=_PURPOSE,
            bytes=upload.num_bytes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )

    async def list(self, request: Request) -> Response:
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {abbreviate(order)}.", "order")
        page = Page(
            query.get("after"),
            _limit(query, _MAX_FILES_PER_PAGE, _MAX_FILES_PER_PAGE),
            order == "asc",
        )
        files, more = await self._batches.store.files(
            self._owner(request), page, query.get("purpose")
        )
        return reply(_listed([each.json() for each in files], more))

    async def retrieve(self, request: Request, file_id: str) -> Response:
        record = await self._batches.store.file(file_id, self._owner(request))
        return reply(record.json())

    async def content(self, request: Request, file_id: str) -> Response:
        store = self._batches.store
        record = await store.file(file_id, self._owner(request))
        return FileResponse(
            store.path_of(record.id),
            media_type="application/octet-stream",
            filename=record.filename,
            headers={"X-Content-Type-Options": "nosniff"},
        )

    async def delete(self, request: Request, file_id: str) -> Response:
        await self._batches.store.delete_file(file_id, self._owner(request))
        return reply({"id": file_id, "object": "file", "deleted": True})


class BatchRoutes(_Stored):
    """The endpoints under /v1/batches."""

    async def create(self, request: Request) -> Response:
        batches = self._batches
        body = await read_as(request, CreateBatchRequest.read, self._services)
        if body.endpoint not in batches.endpoints:
            raise RequestError(
                f"endpoint must be one of {', '.join(sorted(batches.endpoints))}, got "
                f"{abbreviate(body.endpoint)}.",
                "endpoint",
            )
        now, after = batches.store.now(), body.output_expires_after
        record = BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            owner=self._owner(request),
            status="validating",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + body.window_s,
            metadata=body.metadata,
            output_expires_after_s=None if after is None else after.seconds,
        )
        await batches.store.add_batch(record)
        batches.wake()
        return reply(self._json(record, Counts()))

    async def list(self, request: Request) -> Response:
        query = request.query_params
        limit = _limit(query, _DEFAULT_BATCHES_PER_PAGE, _MAX_BATCHES_PER_PAGE)
        page = Page(query.get("after"), limit)
        found, more = await self._batches.store.batches(self._owner(request), page)
        return reply(_listed([self._json(*each) for each in found], more))

    async def retrieve(self, request: Request, batch_id: str) -> Response:
        return reply(self._json(*await self._batches.store.batch(batch_id, self._owner(request))))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        batches, owner = self._batches, self._owner(request)
        record, counts = await batches.store.batch(batch_id, owner)
        if record.status != "cancelling":
            changed = await batches.store.change(
                batch_id,
                ("validating", "in_progress"),
                status="cancelling",
                cancelling_at=batches.store.now(),
            )
            if changed is None:
                record, _ = await batches.store.batch(batch_id, owner)
                raise Busy(f"a batch with the status {record.status} cannot be cancelled.")
            record = changed
            batches.wake()
        return reply(self._json(record, counts))

    def _json(self, record: BatchRecord, counts: Counts) -> dict[str, Any]:
        return record.json(counts, self._batches.problem_of(record.id))


def _lifetime(fields: Mapping[str, str]) -> int | None:
    """The seconds of a form's expires_after; None: the file does not expire."""
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    seconds = int(text) if text is not None and text.isascii() and text.isdecimal() else 0
    if anchor != "created_at" or not _MIN_LIFETIME_S <= seconds <= _MAX_LIFETIME_S:
        raise RequestError(
            "expires_after needs the anchor created_at and seconds from "
            f"{_MIN_LIFETIME_S:,} to {_MAX_LIFETIME_S:,}.",
            "expires_after",
        )
    return seconds


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError(f"limit must be 1 to {most:,}, got {abbreviate(text)}.", "limit")
    return int(text)


def _listed(data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }
