"""Named workloads in token ids, with a fixed number of output tokens, equal for every engine.

decode_bN   N requests at once, 128 in, 256 out (`decode`: N from --batch)
prefill     32 requests of 2,048 in, 1 out
mixed       512 requests, 64..1024 in, 64..512 out
prefix      256 requests with 1,024 shared and 64 own prompt tokens, 64 out
ioAxBxN     N requests of A in, B out (`io`: 512 in, 512 out, 64 requests by default)
nano        256 requests, 100..1024 in and out, temperature 0.6
ragged      64 short prompts, 8..256 out: uneven lengths, to compare batching
shared      32 requests with 1,000 shared and 32 own prompt tokens, 16 out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from random import Random
from typing import NamedTuple

from windlass.config import flag
from windlass.errors import ConfigError
from windlass.settings import at_least
from windlass.tools.common.requests import Request

_SEED = 1234


class Shape(NamedTuple):
    """Lengths of one request, without the shared prefix."""

    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that replace a workload's defaults; None keeps the default."""

    batch: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    num_requests: int | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, *(item.name for item in fields(self)))

    def given(self) -> dict[str, int]:
        pairs = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of fixed lengths. Token ids differ from run to run, lengths do not."""

    name: str
    shapes: tuple[Shape, ...]
    num_shared: int = 0  # tokens of the common prefix
    temperature: float = 0.0
    num_rows: int = 1  # requests that must run concurrently
    deterministic: bool = False

    def requests(self, vocab_size: int, draw: int = 0) -> list[Request]:
        """The requests. Another `draw` gives other ids, so a prefix cache has no hits."""
        random = Random(f"{_SEED} {self.name} {draw}")
        start = random.choices(range(vocab_size), k=self.num_shared)
        return [
            Request(
                start + random.choices(range(vocab_size), k=shape.num_prompt),
                shape.num_output,
                temperature=self.temperature,
                deterministic=self.deterministic,
            )
            for shape in self.shapes
        ]


def _even(count: int, num_prompt: int, num_output: int) -> tuple[Shape, ...]:
    return (Shape(num_prompt, num_output),) * count


def _decode(sizes: Sizes) -> Workload:
    count = sizes.batch or 1
    shapes = _even(count, sizes.input_len or 128, sizes.output_len or 256)
    return Workload(f"decode_b{count}", shapes, num_rows=count)


def _prefill(sizes: Sizes) -> Workload:
    return Workload("prefill", _even(sizes.num_requests or 32, sizes.input_len or 2048, 1))


def _mixed(sizes: Sizes) -> Workload:
    random = Random(_SEED)
    count = sizes.num_requests or 512
    shapes = [Shape(random.randint(64, 1024), random.randint(64, 512)) for _ in range(count)]
    return Workload("mixed", tuple(shapes))


def _prefix(sizes: Sizes) -> Workload:
    shapes = _even(sizes.num_requests or 256, 64, sizes.output_len or 64)
    return Workload("prefix", shapes, num_shared=sizes.input_len or 1024)


def _io(sizes: Sizes) -> Workload:
    num_in, num_out = sizes.input_len or 512, sizes.output_len or 512
    count = sizes.num_requests or 64
    return Workload(f"io{num_in}x{num_out}x{count}", _even(count, num_in, num_out))


def _nano(sizes: Sizes) -> Workload:
    """Lengths of nano-vllm's benchmark, which draws lengths and ids from one stream with seed 0."""
    random = Random(0)
    count = sizes.num_requests or 256
    prompts = []
    for _ in range(count):
        prompts.append(random.randint(100, 1024))
        for _ in range(prompts[-1]):
            random.randint(0, 10_000)
    shapes = tuple(Shape(num_prompt, random.randint(100, 1024)) for num_prompt in prompts)
    return Workload("nano", shapes, temperature=0.6)


def _ragged(sizes: Sizes) -> Workload:
    random = Random(_SEED)
    count = sizes.num_requests or 64
    shapes = [Shape(random.randint(16, 64), random.randint(8, 256)) for _ in range(count)]
    return Workload("ragged", tuple(shapes))


def _shared(sizes: Sizes) -> Workload:
    shapes = _even(sizes.num_requests or 32, 32, sizes.output_len or 16)
    return Workload("shared", shapes, num_shared=sizes.input_len or 1000)


class _Kind(NamedTuple):
    make: Callable[[Sizes], Workload]
    takes: tuple[str, ...]  # sizes that can be set


_KINDS = {
    "decode": _Kind(_decode, ("batch", "input_len", "output_len")),
    "prefill": _Kind(_prefill, ("num_requests", "input_len")),
    "mixed": _Kind(_mixed, ("num_requests",)),
    "prefix": _Kind(_prefix, ("num_requests", "input_len", "output_len")),
    "io": _Kind(_io, ("num_requests", "input_len", "output_len")),
    "nano": _Kind(_nano, ("num_requests",)),
    "ragged": _Kind(_ragged, ("num_requests",)),
    "shared": _Kind(_shared, ("num_requests", "input_len", "output_len")),
}
# Names that contain their sizes, in this order.
_NUMBERED = {
    "decode": (re.compile(r"decode_b(\d+)"), ("batch",)),
    "io": (re.compile(r"io(\d+)x(\d+)x(\d+)"), ("input_len", "output_len", "num_requests")),
}


def find(name: str, sizes: Sizes = Sizes()) -> Workload:  # noqa: B008 - frozen
    """The workload of that name; changed sizes are appended to its name."""
    kind, in_name = _parse(name)
    given = _taken(kind, in_name, sizes)
    made = _KINDS[kind].make(Sizes(**in_name, **given))
    in_names = _NUMBERED[kind][1] if kind in _NUMBERED else ()
    changed = [f"{key}={value}" for key, value in given.items() if key not in in_names]
    return replace(made, name=f"{made.name}[{','.join(changed)}]") if changed else made


def find_all(names: str, sizes: Sizes, also_used: Collection[str] = ()) -> list[Workload]:
    """Several workloads from comma-separated names. A size that none of them takes is an error.

    `also_used`: sizes that the caller uses itself.
    """
    parts = [name.strip() for name in names.split(",") if name.strip()]
    if not parts:
        raise ConfigError(f"--workload is empty. Known: {', '.join(_KINDS)}.")
    taken = {key for name in parts for key in _taken(*_parse(name), sizes)}
    for key in sizes.given():
        if key not in taken and key not in also_used:
            raise ConfigError(f"{flag(key)} has no effect with --workload {names}. Remove it.")
    return [find(name, sizes) for name in parts]


def _taken(kind: str, in_name: dict[str, int], sizes: Sizes) -> dict[str, int]:
    takes = set(_KINDS[kind].takes) - in_name.keys()
    return {key: value for key, value in sizes.given().items() if key in takes}


def _parse(name: str) -> tuple[str, dict[str, int]]:
    """Split a name into the kind of workload and the sizes in the name."""
    if name in _KINDS:
        return name, {}
    for kind, (pattern, keys) in _NUMBERED.items():
        found = pattern.fullmatch(name)
        if found is not None:
            return kind, dict(zip(keys, map(int, found.groups()), strict=True))
    raise ConfigError(
        f"workload {name!r} is not known. Known: {', '.join(_KINDS)}, and names with sizes such "
        "as decode_b8 and io1000x500x64."
    )
