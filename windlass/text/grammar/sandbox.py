"""The engine's end of the grammar sandbox: starts its process, hands it forms, gets verdicts.

The process is started by the first form and serves all that follow; one that died is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.errors import EngineError
from windlass.text.grammar.vocabulary import Vocabulary
from windlass.text.grammar.wire import recv_frame, send_frame

# The interpreter is isolated from the working folder, and finds modules where this one does.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from windlass.text.grammar.worker import main; main(int(sys.argv[1]))"
)
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the sandbox found out about a form."""

    grammar: str = ""  # as llguidance reads it
    num_bytes: int = 0  # that the compiled grammar takes
    refused: str = ""  # why; "": it compiled within the limits
    final: bool = True  # False: the machine was too busy, another time it may compile


class Ticket:
    """One form's stay in the sandbox, which another thread may end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Kill the compiler, now or as soon as it would start."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # it has just ended by itself
                    self._connection.shutdown(socket.SHUT_RDWR)

    def attach(self, connection: socket.socket) -> None:
        with self._lock:
            self._connection = connection
        if self.cancelled:
            self.cancel()

    def detach(self) -> None:
        with self._lock:
            self._connection = None


class Sandbox:
    """Owns the process. Its methods may be called by several threads at once."""

    def __init__(self, vocabulary: Vocabulary, config: GrammarConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._is_ready = False
        self._end: weakref.finalize[..., object] | None = None
        self.pid: int | None = None  # of the process, while there is one

    def check(self, form: StructuredOutputs, ticket: Ticket) -> Verdict:
        """Compile `form` there, and wait for the verdict. EngineError: it gave none."""
        request = json.dumps(form.fields()).encode()
        for _ in range(2):  # a process that died is replaced
            mine, theirs = socket.socketpair()
            with mine, theirs:
                if self._hand_over(theirs):
                    theirs.close()
                    answer = _ask(mine, request, ticket)
                    if answer is not None:
                        return _verdict(json.loads(answer))
            if ticket.cancelled:
                raise EngineError("nobody waits for this grammar any more.")
            self.close()
        raise EngineError(
            "the grammar sandbox ended twice while it compiled a grammar; see the log."
        )

    def _hand_over(self, connection: socket.socket) -> bool:
        """Give the process its end of a connection; False: it had died."""
        with self._lock:
            control = self._control or self._start()
            if not self._is_ready:
                self._wait_until_ready(control)
            try:
                socket.send_fds(control, [b"j"], [connection.fileno()])
            except OSError:
                return False
            return True

    def start(self) -> None:
        """Start the process, and leave it to its preparations; `check` waits for them."""
        with self._lock:
            if self._control is None:
                self._start()

    def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        command = [sys.executable, "-I", "-c", _PROGRAM, str(theirs.fileno()), path]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals of a terminal are the engine's business
            )
        self._control, self.pid = mine, process.pid
        self._end = weakref.finalize(self, _end, process, mine)
        mine.settimeout(_START_TIMEOUT_S)
        try:
            self._send_vocabulary(mine)
        except OSError as error:
            self._stop()
            raise EngineError(f"the grammar sandbox could not be started: {error}") from error
        return mine

    def _wait_until_ready(self, control: socket.socket) -> None:
        try:
            self._is_ready = recv_frame(control) is not None
        except OSError as error:
            self._stop()
            raise EngineError(f"the grammar sandbox could not be started: {error}") from error
        if not self._is_ready:
            self._stop()
            raise EngineError("the grammar sandbox ended while it was started; see the log.")
        control.settimeout(None)

    def _send_vocabulary(self, control: socket.socket) -> None:
        vocabulary = self._vocabulary
        settings = {
            "eos_ids": vocabulary.eos_ids,
            "special_ids": vocabulary.special_ids,
            "config": asdict(self._config),
        }
        for frame in (json.dumps(settings).encode(), *vocabulary.packed()):
            send_frame(control, frame)

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._control = self._end = self.pid = None
        self._is_ready = False

    def close(self) -> None:
        """End the process; the next form starts another."""
        with self._lock:
            self._stop()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(connection: socket.socket, request: bytes, ticket: Ticket) -> bytes | None:
    """The answer to one request; None: the connection was lost, or cancelled."""
    ticket.attach(connection)
    try:
        send_frame(connection, request)
        return recv_frame(connection)
    except OSError:
        return None
    finally:
        ticket.detach()


def _verdict(reply: dict[str, Any]) -> Verdict:
    if "error" in reply:
        raise EngineError(f"the grammar sandbox failed: {reply['error']}")
    if "late" in reply:
        return Verdict(refused=reply["late"], final=False)
    if "refused" in reply:
        return Verdict(refused=reply["refused"])
    return Verdict(grammar=reply["grammar"], num_bytes=reply["num_bytes"])
