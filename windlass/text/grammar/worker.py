"""The sandbox process: compiles clients' grammars under limits of time, memory and stack.

The process reads the vocabulary once. For each grammar it forks a supervisor, which forks a
compiler. The supervisor kills the compiler when it exceeds a limit, when the engine cancels, or when
the engine dies; the vocabulary stays ready for the next grammar. A process that forks must have one
thread: this module starts none and does not import torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.text.grammar.parser_limits import parser_limits
from windlass.text.grammar.translate import to_llguidance
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer
from windlass.text.grammar.wire import recv_frame, send_frame

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Reply = dict[str, Any]

_NICE = 10  # the engine's threads have priority
# Smaller than any stack in the engine: a grammar that fits here fits there.
_STACK_BYTES = 2 * 2**20
# Bounds the wait for a compiler that gets no CPU.
_WALL_TIME_FACTOR = 20
# Random tokens to try: some grammars fail only during generation.
_NUM_TRIAL_TOKENS = 32
_MAX_REASON = 800  # characters
_MAX_LINE = 120


class _Compiler:
    """Owns the vocabulary and the limits."""

    def __init__(
        self, tokenizer: LLTokenizer, vocabulary: Vocabulary, config: GrammarConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(vocabulary.eos_ids)
        self._special_ids = vocabulary.special_texts
        self._config = config
        self._limits = parser_limits(config)

    def supervise(self, connection: socket.socket) -> None:
        """Receive a grammar from `connection`, compile it in a child, and send the result."""
        request = recv_frame(connection)
        if request is None:
            return
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            os.close(read_end)
            connection.close()
            self._compile_and_exit(request, write_end)
        os.close(write_end)
        waits = self._config.grammar_compile_timeout * _WALL_TIME_FACTOR
        output, end = _read_all(read_end, connection, time.monotonic() + waits)
        if end != "eof":
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if end == "closed":
            return
        if end == "late":
            reply: Reply = {"late": f"it was not compiled within {waits:g} s."}
        else:
            reply = json.loads(output) if output else self._cause_of_death(status)
        send_frame(connection, json.dumps(reply).encode())

    def _cause_of_death(self, status: int) -> Reply:
        """Explain why a compiler ended without a result."""
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        config = self._config
        if number in (signal.SIGPROF, signal.SIGXCPU):
            limit = f"{config.grammar_compile_timeout:g} s of CPU time (--grammar-compile-timeout)"
        elif number == signal.SIGABRT:
            limit = f"{config.grammar_memory_bytes / 2**20:,.0f} MiB of memory (--grammar-memory)"
        elif number in (signal.SIGSEGV, signal.SIGBUS):
            limit = f"{_STACK_BYTES // 2**20} MiB of stack: it is nested too deeply"
        else:
            return {"error": f"the compiler ended with status {status}"}
        return {"refused": f"compiling it takes more than {limit}."}

    def _compile_and_exit(self, request: bytes, write_end: int) -> NoReturn:
        """Run as the child. Every exit ends the process."""
        try:
            self._enter_limits()
            reply = self._compile(json.loads(request))
        except RequestError as error:
            reply = {"refused": _shortened(str(error))}
        except MemoryError:
            os.abort()
        except Exception as error:  # border of the process: the engine raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(write_end, "wb") as output:
            output.write(json.dumps(reply).encode())
        os._exit(0)

    def _enter_limits(self) -> None:
        import resource

        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # keep llguidance's panics out of the log
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":  # other systems do not enforce it
            limit = _address_space() + self._config.grammar_memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
        seconds = self._config.grammar_compile_timeout
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds) + 1, math.ceil(seconds) + 2))
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def _compile(self, fields: dict[str, Any]) -> Reply:
        from llguidance import LLMatcher

        before = _peak_resident()
        grammar = to_llguidance(
            StructuredOutputs(**fields), self._config.schema_strictness, self._special_ids
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        self._try_tokens(matcher)
        grown = _peak_resident() - before
        del matcher  # freeing it must fit the stack, too
        return {"grammar": grammar, "num_bytes": grown + len(grammar)}

    def _try_tokens(self, matcher: LLMatcher) -> None:
        """Generate random tokens with the grammar, under the limits of a step."""
        random, timeout_s = Random(0), self._config.grammar_step_timeout
        for number in range(_NUM_TRIAL_TOKENS):
            began = time.thread_time()
            token = _choose(matcher.compute_bitmask(), self._eos_ids, random)
            _check(matcher)
            if token is not None:
                matcher.consume_token(token)
                _check(matcher)
            took = time.thread_time() - began
            if took > timeout_s:
                raise RequestError(
                    f"token {number + 1} of a trial took {1e3 * took:.0f} ms, at most "
                    f"{1e3 * timeout_s:g} ms are allowed (--grammar-step-timeout)."
                )
            if token is None or matcher.is_stopped():
                matcher.reset()


class _GreedyEncoder:
    """Encodes forced text with the longest tokens that fit. Needs no files of the model."""

    tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        return [] if self.tokenizer is None else self.tokenizer.greedy_tokenize(text)


def _choose(mask: bytes, eos_ids: frozenset[int], random: Random) -> int | None:
    """Choose an allowed token that does not end the output. None: there is none."""
    filled = [at for at, byte in enumerate(mask) if byte]
    random.shuffle(filled)
    for at in filled:
        tokens = [8 * at + bit for bit in range(8) if mask[at] >> bit & 1]
        tokens = [token for token in tokens if token not in eos_ids]
        if tokens:
            return random.choice(tokens)
    return None


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(_reason_of(matcher))


def _reason_of(matcher: LLMatcher) -> str:
    """The reason why a matcher failed."""
    reason = matcher.get_error().replace("<non-verbose/>", "").strip()
    if reason in ("NoExtension", "NoExtensionBias"):
        return "no text satisfies it."
    return reason


def _shortened(reason: str) -> str:
    """Cut long lines in the middle: errors quote the grammar."""
    half = _MAX_LINE // 2
    lines = [
        line if len(line) <= _MAX_LINE else f"{line[:half]} … {line[-half:]}"
        for line in reason.splitlines()
    ]
    return "\n".join(lines)[:_MAX_REASON]


def _read_all(read_end: int, connection: socket.socket, deadline: float) -> tuple[bytes, str]:
    """Read the child's output. Also returns why reading ended: "eof", "closed" by the engine, "late"."""
    output = b""
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        watched = [pipe.fileno(), connection.fileno()]
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(watched, [], [], left)
            if pipe.fileno() in ready:
                part = pipe.read(1 << 16)
                if not part:
                    return output, "eof"
                output += part
            elif ready:  # the engine sends nothing else: it closed the connection
                return output, "closed"
    return output, "late"


def _address_space() -> int:
    """Mapped bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * mmap.PAGESIZE


def _peak_resident() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _read_vocabulary(control: socket.socket) -> tuple[Vocabulary, GrammarConfig] | None:
    frames = [recv_frame(control) for _ in range(3)]
    settings, lengths, joined = frames
    if settings is None or lengths is None or joined is None:
        return None
    values = json.loads(settings)
    vocabulary = Vocabulary.unpacked(
        lengths, joined, eos_ids=values["eos_ids"], special_ids=values["special_ids"]
    )
    return vocabulary, GrammarConfig(**values["config"])


def main(control_fd: int) -> None:
    """Serve the engine over a Unix socket until it closes."""
    control = socket.socket(fileno=control_fd)
    received = _read_vocabulary(control)
    if received is None:
        return
    vocabulary, config = received
    encoder = _GreedyEncoder()
    encoder.tokenizer = make_tokenizer(vocabulary, encoder)
    compiler = _Compiler(encoder.tokenizer, vocabulary, config)
    os.nice(_NICE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    send_frame(control, b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if not os.fork():
                control.close()
                _supervise_and_exit(compiler, connection)


def _supervise_and_exit(compiler: _Compiler, connection: socket.socket) -> NoReturn:
    """Run as the child. Every exit ends the process."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        compiler.supervise(connection)
        status = 0
    except Exception:  # border of the process: the engine sees a closed connection
        traceback.print_exc()
    finally:
        os._exit(status)
