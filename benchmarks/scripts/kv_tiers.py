"""Measures KV tiers: conversations with a growing history, of which the device holds a part.

    python benchmarks/scripts/kv_tiers.py -o benchmarks/kv-tiers-cpu.json
    python benchmarks/scripts/kv_tiers.py benchmarks/models/llama-3.1-8b --load-format dummy

Each user begins a conversation with a long prompt and comes back for some turns; each turn sends the whole
history, the last output and new tokens. Between two turns of a user come those of others, in random order,
so that its KV blocks are evicted from the device. A turn without a tier computes the history again; with
one it is loaded. Each tier has an engine of its own and the same conversations; on a CPU in float32 the
outputs must be equal. At the end, a prompt is timed before and after a restart with the same cache folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest, Timeline
from windlass.engine import Engine
from windlass.tools.common.device import release_memory
from windlass.tools.common.record import Record
from windlass.tools.common.summary import percentile

TIERS = ("none", "host", "disk")
_SEED = 1234
_NOTES = (
    "first: the turns that begin the conversations, which every tier computes; later: the turns of users who "
    "come back. tok_s: prompt and output tokens of all requests per second, cached ones included. ratio: "
    "requests per second over those without a tier in the same round, median of the rounds. hits: prompt "
    "tokens of later turns by where they were found; computed: the rest. restart: TTFT of one prompt, cold, "
    "and after a restart of the engine with the same --prefix-cache-dir."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The workload: users, and the tokens of a conversation at its end."""

    num_users: int
    num_held: int  # conversations that the device's KV cache holds
    length: int
    turns: int  # with the first one
    new_tokens: int
    output: int
    concurrency: int
    max_seconds: float

    @property
    def first_prompt(self) -> int:
        return self.length - self.output - (self.turns - 1) * (self.new_tokens + self.output)

    def check(self) -> None:
        if self.first_prompt < 1:
            raise SystemExit(
                f"--length {self.length} is too short for {self.turns} turns of {self.new_tokens} new and "
                f"{self.output} output tokens."
            )
        if not 1 <= self.concurrency <= self.num_held < self.num_users:
            raise SystemExit("expected 1 <= --concurrency <= --held < --conversations.")


@dataclass(slots=True)
class Phase:
    """The requests of one phase, as they ended."""

    seconds: float = 0.0
    lines: list[Timeline] = field(default_factory=list)
    is_cut: bool = False  # --max-seconds ended it

    @property
    def requests_s(self) -> float:
        return len(self.lines) / self.seconds

    def row(self) -> dict[str, Any]:
        waits = sorted(
            1e3 * (line.first_token - line.arrived)
            for line in self.lines
            if line.first_token is not None
        )
        num_tokens = sum(line.num_prompt + line.num_output for line in self.lines)
        num_prompt = sum(line.num_prompt for line in self.lines)
        return {
            "requests": len(self.lines),
            "seconds": round(self.seconds, 3),
            "requests_s": round(self.requests_s, 3),
            "tok_s": round(num_tokens / self.seconds, 1),
            "ttft_p50_ms": round(percentile(waits, 50), 2),
            "ttft_p99_ms": round(percentile(waits, 99), 2),
            "prompt_tokens": num_prompt,
            "cached_tokens": sum(line.num_cached for line in self.lines),
            "cut": self.is_cut,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One run with one tier: its phases, what the tier did in the later turns, the tokens at the end."""

    phases: dict[str, Phase]
    counts: dict[str, Any]
    histories: list[list[int]]


class Chats:
    """Conversations of random tokens with one engine. Another `draw` has other tokens."""

    def __init__(self, engine: Engine, sizes: Sizes, vocab_size: int, draw: int) -> None:
        self._engine = engine
        self._sizes = sizes
        self._vocab = range(3, vocab_size)
        self._draw = draw
        self.histories: list[list[int]] = [[] for _ in range(sizes.num_users)]

    def run(self, users: Sequence[int], num_new: int) -> Phase:
        """Let `users` take turns in this order, `concurrency` at a time, each one once at a time."""
        engine, sizes, phase = self._engine, self._sizes, Phase()
        waiting, busy = list(users), set[int]()
        began = time.perf_counter()
        while waiting or busy:
            if phase.is_cut or time.perf_counter() - began > sizes.max_seconds:
                phase.is_cut = phase.is_cut or bool(waiting)
                waiting.clear()
            while len(busy) < sizes.concurrency:
                at = next((i for i, user in enumerate(waiting) if user not in busy), None)
                if at is None:
                    break
                user = waiting.pop(at)
                busy.add(user)
                engine.add(self._turn(user, num_new))
            for output in engine.step():
                user = int(output.request_id.split("-")[0])
                self.histories[user] += output.tokens
                if output.finish is not None:
                    if output.timeline is None or output.error is not None:
                        raise SystemExit(f"a request failed: {output.error}")
                    busy.remove(user)
                    phase.lines.append(output.timeline)
        phase.seconds = time.perf_counter() - began
        engine.traces()
        return phase

    def _turn(self, user: int, num_new: int) -> NewRequest:
        history = self.histories[user]
        random = Random(f"{_SEED} {self._draw} {user} {len(history)}")
        history += random.choices(self._vocab, k=num_new)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self._sizes.output, ignore_eos=True, seed=0
        )
        return NewRequest(f"{user}-{len(history)}", list(history), sampling)


class Bench:
    """Builds an engine per run over one set of weights."""

    def __init__(
        self, options: dict[str, Any], sizes: Sizes, gb: dict[str, float], disk_dir: str | None
    ) -> None:
        self.options = options
        self._sizes = sizes
        self._gb = gb
        self._disk_dir = disk_dir
        self._opened = open_model(EngineConfig.of(**options))
        self._weights: Any = None
        self.choices: dict[str, str] = {}

    @contextmanager
    def engine(self, tier: str, folder: str) -> Iterator[Built]:
        """An engine with one tier and a device cache for `num_held` conversations."""
        sizes = self._sizes
        block_size = self.options.get("block_size") or 16
        per_user = -(-(sizes.length + 1) // block_size)
        tiers: dict[str, dict[str, Any]] = {
            "none": {},
            "host": {"kv_offload_gb": self._gb["host"]},
            "disk": {"prefix_cache_dir": folder, "prefix_cache_gb": self._gb["disk"]},
        }
        config = EngineConfig.of(
            **self.options,
            **tiers[tier],
            num_blocks=sizes.num_held * per_user,
            max_num_seqs=sizes.concurrency,
        )
        built = build_engine(config, self._opened.source, self._weights)
        self._weights = built.weights
        self.choices = {choice.what: choice.value for choice in built.report.choices}
        try:
            yield built
        finally:
            built.close()
            del built
            release_memory()

    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="kv-tiers-", dir=self._disk_dir)

    def run(self, tier: str, draw: int) -> Run:
        """All conversations with one tier."""
        sizes = self._sizes
        with self._folder() as folder, self.engine(tier, folder) as built:
            vocab_size, engine = built.report.vocab_size, built.engine
            warm_up = Chats(engine, sizes, vocab_size, -1 - draw)
            warm_up.run(range(sizes.concurrency), sizes.first_prompt)
            engine.reset_prefix_cache()
            chats = Chats(engine, sizes, vocab_size, draw)
            first = chats.run(range(sizes.num_users), sizes.first_prompt)
            users = [*range(sizes.num_users)] * (sizes.turns - 1)
            Random(f"{_SEED} {draw}").shuffle(users)
            before = engine.stats()
            later = chats.run(users, sizes.new_tokens)
            counts = tier_counts(engine.stats(), before)
            return Run({"first": first, "later": later}, counts, chats.histories)

    def restart(self, num_prompt: int, repeat: int) -> dict[str, Any]:
        """TTFT of a prompt, cold and after a restart with the same folder: medians."""
        times: dict[str, list[float]] = {"cold": [], "warm": []}
        num_cached = 0
        for draw in range(repeat):
            with self._folder() as folder:
                for name in times:
                    with self.engine("disk", folder) as built:
                        vocab_size = built.report.vocab_size
                        chats = Chats(built.engine, self._sizes, vocab_size, -1000 - draw)
                        chats.run([1], num_prompt)  # compiles kernels
                        (line,) = chats.run([0], num_prompt).lines
                        assert line.first_token is not None
                        times[name].append(1e3 * (line.first_token - line.arrived))
                        num_cached = line.num_cached
                        built.engine.finish_moves()
        ratios = [warm / cold for cold, warm in zip(*times.values(), strict=True)]
        return {
            "tier": "disk",
            "phase": "restart",
            "prompt_tokens": num_prompt,
            "cached_tokens": num_cached,
            "cold_ttft_ms": round(median(times["cold"]), 2),
            "warm_ttft_ms": round(median(times["warm"]), 2),
            "ratio": round(median(ratios), 3),
        }


def tier_counts(stats: EngineStats, before: EngineStats) -> dict[str, Any]:
    """What the tiers did between two stats."""
    old = {tier.name: tier for tier in before.tiers}
    counts: dict[str, Any] = {}
    for tier in stats.tiers:
        last = old[tier.name]
        counts |= {
            f"{tier.name}_hit_tokens": tier.num_hit_tokens - last.num_hit_tokens,
            f"{tier.name}_loads": tier.num_loads - last.num_loads,
            f"{tier.name}_saves": tier.num_saves - last.num_saves,
            f"{tier.name}_failures": tier.num_failures - last.num_failures,
            f"{tier.name}_gb": round(tier.num_bytes / 1e9, 3),
        }
    for reason, count in stats.tier_decisions.items():
        counts[reason.replace(" ", "_")] = count - before.tier_decisions.get(reason, 0)
    return counts


def measure(bench: Bench, tiers: Sequence[str], repeat: int, check: bool) -> list[dict[str, Any]]:
    """Rows of all tiers, which take turns; `check`: other outputs than without a tier are an error."""
    runs: dict[str, list[Run]] = {tier: [] for tier in tiers}
    for draw in range(repeat):
        for tier in tiers:
            run = bench.run(tier, draw)
            runs[tier].append(run)
            later = run.phases["later"].row()
            print(f"{tier}: {later}, {run.counts}", flush=True)
            same = run.histories == runs[tiers[0]][draw].histories
            if check and not same:
                raise SystemExit(f"{tier}: other tokens than with {tiers[0]}.")
    rows = []
    for tier, found in runs.items():
        middle = sorted(found, key=lambda run: run.phases["later"].seconds)[(repeat - 1) // 2]
        for name in ("first", "later"):
            row = {"tier": tier, "phase": name, **middle.phases[name].row()}
            ratios = [
                own.phases[name].requests_s / base.phases[name].requests_s
                for own, base in zip(found, runs[tiers[0]], strict=True)
            ]
            row["ratio"] = round(median(ratios), 3)
            rows.append(row | (middle.counts if name == "later" else {}))
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument(
        "--tiers", default=",".join(TIERS), help="the first is the one to compare with"
    )
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--held", type=int, help="conversations on the device; default: a fifth")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens of a conversation at its end"
    )
    parser.add_argument("--turns", type=int, default=4, help="with the first one")
    parser.add_argument("--new-tokens", type=int, default=24, help="of a later turn's prompt")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument(
        "--concurrency", type=int, help="users at once; default: a quarter of --held"
    )
    parser.add_argument("--host-gb", type=float, default=4.0)
    parser.add_argument("--disk-gb", type=float, default=4.0)
    parser.add_argument("--disk-dir", help="where the folders of the disk tier are made")
    parser.add_argument("--restart-prompt", type=int, default=0, help="tokens; 0: no restart")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--max-seconds", type=float, default=600.0, help="of each phase of each tier"
    )
    parser.add_argument(
        "--check", action="store_true", help="other outputs than --tiers[0]: an error"
    )
    parser.add_argument("--notes", default="")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    tiers = options.tiers.split(",")
    if not set(tiers) <= set(TIERS):
        raise SystemExit(f"--tiers are {', '.join(TIERS)}; got {options.tiers}.")
    num_held = options.held or max(1, options.conversations // 5)
    sizes = Sizes(
        num_users=options.conversations,
        num_held=num_held,
        length=options.length,
        turns=options.turns,
        new_tokens=options.new_tokens,
        output=options.output_tokens,
        concurrency=options.concurrency or max(1, num_held // 4),
        max_seconds=options.max_seconds,
    )
    sizes.check()
    engine: dict[str, Any] = {
        "model": options.model,
        "load_format": options.load_format,
        "device": options.device,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_model_len": max(sizes.length, options.restart_prompt + sizes.output) + 1,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    gb = {"host": options.host_gb, "disk": options.disk_gb}
    bench = Bench(engine, sizes, gb, options.disk_dir)
    rows = measure(bench, tiers, options.repeat, options.check)
    if options.restart_prompt:
        rows.append(bench.restart(options.restart_prompt, options.repeat))
        print(rows[-1], flush=True)
    if options.output is not None:
        settings = {**engine, **asdict(sizes), "gb": gb, "choices": bench.choices}
        Record("kv tiers", rows, " ".join((_NOTES, options.notes)).strip(), settings).save(
            options.output
        )


if __name__ == "__main__":
    main()
