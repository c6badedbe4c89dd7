"""Keeps responses that a later request may continue (`previous_response_id`)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from windlass.serve.abbreviate import abbreviate
from windlass.serve.problems import ResponseNotFound

Json = dict[str, Any]

_MAX_RESPONSES = 4_096
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the conversation up to it, instructions excluded."""

    owner: str
    response: Json
    conversation: bytes  # the JSON of the messages

    @property
    def messages(self) -> list[Json]:
        return msgspec.json.decode(self.conversation)


class ResponseStore:
    """The latest responses, within a number and a size. They are lost when the server ends."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def add(self, response: Json, messages: list[Json], owner: str) -> None:
        stored = StoredResponse(owner, response, msgspec.json.encode(messages))
        self._responses[response["id"]] = stored
        self._num_bytes += len(stored.conversation)
        while len(self._responses) > _MAX_RESPONSES or self._num_bytes > _MAX_BYTES:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= len(oldest.conversation)

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ResponseNotFound for an unknown id, and for one of another key."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(
                f"there is no response {abbreviate(response_id)}. The server keeps the last "
                f"{_MAX_RESPONSES:,} responses, up to {_MAX_BYTES // 2**20} MiB of conversations, "
                "until it ends.",
                "previous_response_id",
            )
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        stored = self.get(response_id, owner)
        del self._responses[response_id]
        self._num_bytes -= len(stored.conversation)
