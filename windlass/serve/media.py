"""Media types of streams."""

from __future__ import annotations

EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
