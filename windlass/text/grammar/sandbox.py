"""The engine's side of the grammar sandbox: starts its process, sends grammars, receives verdicts.

The first grammar starts the process, which serves all later ones. A process that died is replaced.
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
from windlass.machine.posix import need_posix
from windlass.text.grammar.vocabulary import Vocabulary
from windlass.text.grammar.wire import recv_frame, send_frame

# The interpreter ignores the working folder, and finds modules in the same places as this one.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from windlass.text.grammar.worker import main; main(int(sys.argv[1]))"
)
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sandbox's result for one grammar."""

    grammar: str = ""  # in llguidance's format
    num_bytes: int = 0  # memory of the compiled grammar
    refused: str = ""  # the reason; "": it compiled within the limits
    final: bool = True  # False: the machine was too busy; a later attempt may succeed


class Cancellation:
    """Cancels one compilation in the sandbox, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Kill the compiler, now or as soon as it starts."""
        with self._lock:
            self.cancelled = True
            if self._connection is not None:
                with contextlib.suppress(OSError):  # it has just ended
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
    """Owns the process. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, config: GrammarConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._is_ready = False
        self._end: weakref.finalize[..., object] | None = None
        self.pid: int | None = None  # None: no process is running

    def check(self, structured: StructuredOutputs, cancellation: Cancellation) -> Verdict:
        """Compile `structured` and wait for the verdict. Raises EngineError if there is none."""
        request = json.dumps(structured.fields()).encode()
        for _ in range(2):  # the second attempt replaces a process that died
            mine, theirs = socket.socketpair()
            with mine, theirs:
                if self._hand_over(theirs):
                    theirs.close()
                    answer = _ask(mine, request, cancellation)
                    if answer is not None:
                        return _verdict(json.loads(answer))
            if cancellation.cancelled:
                raise EngineError("no request waits for this grammar any longer.")
            self.close()
        raise EngineError(
            "the grammar sandbox ended twice while it compiled a grammar; see the log."
        )

    def _hand_over(self, connection: socket.socket) -> bool:
        """Pass the process its end of a connection. False: the process had died."""
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
        """Start the process without waiting until it is ready; `check` waits."""
        with self._lock:
            if self._control is None:
                self._start()

    def _start(self) -> socket.socket:
        need_posix("Structured output (its sandbox)", "os.fork", "resource", "socket.send_fds")
        mine, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        command = [sys.executable, "-I", "-c", _PROGRAM, str(theirs.fileno()), path]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the engine handles signals of the terminal
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
        """End the process. The next grammar starts another one."""
        with self._lock:
            self._stop()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(connection: socket.socket, request: bytes, cancellation: Cancellation) -> bytes | None:
    """Send one request and return the reply. None: the connection was lost or cancelled."""
    cancellation.attach(connection)
    try:
        send_frame(connection, request)
        return recv_frame(connection)
    except OSError:
        return None
    finally:
        cancellation.detach()


def _verdict(reply: dict[str, Any]) -> Verdict:
    if "error" in reply:
        raise EngineError(f"the grammar sandbox failed: {reply['error']}")
    if "late" in reply:
        return Verdict(refused=reply["late"], final=False)
    if "refused" in reply:
        return Verdict(refused=reply["refused"])
    return Verdict(grammar=reply["grammar"], num_bytes=reply["num_bytes"])
