"""The process that renders chat templates, and its messages.

template_process.py starts it, and kills it when a render takes too long. It imports few modules, so
that it starts fast.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from windlass.child_process import die_with_parent, ignore_signals
from windlass.errors import ConfigError, RequestError
from windlass.text.chat_template import ChatTemplate

_MAX_MEMORY_BYTES = 2**30  # address space of the process, on Linux
_MAX_OPEN_FILES = 64
_NO_MEMORY = f"needs more than {_MAX_MEMORY_BYTES / 2**30:g} GiB of memory"
GIVE_ANOTHER = "Give another one with --chat-template."


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The arguments of ChatTemplate, sent to the process."""

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


class RenderJob(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation to render, and the maximum length of its prompt."""

    messages: list[dict[str, Any]]
    max_chars: int
    options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    template: str | None = None  # of the request itself; None: the model's
    add_generation_prompt: bool | None = None
    continue_final: bool = False


class Booted(msgspec.Struct, tag="booted", frozen=True):
    """The process has started and probes the template now."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    warnings: list[str]


class Unusable(msgspec.Struct, tag="unusable", frozen=True):
    """The template does not parse, or cannot render the simplest conversation."""

    message: str


class Text(msgspec.Struct, tag="text", frozen=True):
    text: str


class TooLong(msgspec.Struct, tag="too_long", frozen=True):
    num_chars: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    message: str
    param: str | None


Reply = Booted | Ready | Unusable | Text | TooLong | Refused
encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(RenderJob).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def template_main(source: TemplateSource, pipe: Connection) -> None:
    """Main function of the process: render jobs until the other end of `pipe` is closed."""
    die_with_parent()
    ignore_signals()
    _limit_resources()
    pipe.send_bytes(encode(Booted()))
    try:
        template = ChatTemplate(source.text, source.special_tokens, source.defaults)
    except ConfigError as error:
        pipe.send_bytes(encode(Unusable(str(error))))
        return
    except MemoryError:
        pipe.send_bytes(encode(Unusable(f"the chat template {_NO_MEMORY}. {GIVE_ANOTHER}")))
        return
    pipe.send_bytes(encode(Ready(list(template.warnings))))
    while True:
        try:
            job = _decode_job(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(encode(_render(template, source, job)))


def _limit_resources() -> None:
    """Bound what a template can take, or do if it left Jinja's sandbox; the parent bounds its time."""
    if sys.platform == "win32":
        return
    import resource

    if sys.platform == "linux":  # other systems do not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))


def _render(template: ChatTemplate, source: TemplateSource, job: RenderJob) -> Reply:
    try:
        if job.template is not None:
            template = ChatTemplate(job.template, source.special_tokens, source.defaults)
        text = template.render(
            job.messages,
            options=job.options,
            add_generation_prompt=job.add_generation_prompt,
            continue_final=job.continue_final,
            tools=job.tools,
        )
    except RequestError as error:
        return Refused(str(error), error.param)
    except ConfigError as error:
        return Refused(str(error), "chat_template")
    except MemoryError:
        return Refused(f"the chat template {_NO_MEMORY} for these messages.", "messages")
    return Text(text) if len(text) <= job.max_chars else TooLong(len(text))
