"""The disk tier in real engines: a restart finds its prompts, and nothing changes a token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import write_adapter, write_model
from tests.runner.test_kv_tiers import SAVE, save_dummy
from tests.runner.test_windows import SIZE, make
from windlass.build import Built
from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest, TierStats
from windlass.tiers.disk_files import fingerprint_folders, writers_of

PROMPTS = [[3 + 5 * i % 89 for i in range(30)] + [7 + n] * 9 for n in range(2)]
Tokens = list[tuple[list[int], list[float]]]


def generate(built: Built, adapter: str = "") -> Tokens:
    """Tokens and log probabilities of both prompts. Deterministic: the same to the bit."""
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, deterministic=True
    )
    found: Tokens = [([], []) for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        built.engine.add(NewRequest(str(number), list(prompt), params, adapter=adapter))
    while built.engine.has_work:
        for output in built.engine.step():
            assert output.error is None
            tokens, scores = found[int(output.request_id)]
            tokens += output.tokens
            scores += [score.logprob for score in output.logprobs or ()]
    return found


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Built]:
    built = make(folder, **{"dtype": "float32", "num_blocks": 40, **options})
    try:
        yield built
    finally:
        built.close()


def run(folder: Path, adapter: str = "", **options: Any) -> tuple[Tokens, EngineStats]:
    """Start an engine, generate once, and close it."""
    with engine(folder, **options) as built:
        return generate(built, adapter), built.engine.stats()


def disk_of(stats: EngineStats) -> TierStats:
    (found,) = (tier for tier in stats.tiers if tier.name == "disk")
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_dummy(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def records(root: str) -> list[Path]:
    return sorted(Path(root).glob("*/*.kv"))


DUMMY: dict[str, Any] = {"load_format": "dummy"}


@pytest.mark.parametrize("case", ["full", "full and window", "latent", "state"])
def test_a_restart_finds_its_prompts(case: str, tmp_path: Path, root: str) -> None:
    SAVE[case](tmp_path)
    want, _ = run(tmp_path)
    cold, before = run(tmp_path, prefix_cache_dir=root)
    warm, after = run(tmp_path, prefix_cache_dir=root)
    assert cold == warm == want
    assert disk_of(before).num_hit_tokens == 0
    # All full blocks of both prompts; a state's block is loaded only if it ends the prefix.
    assert disk_of(after).num_hit_tokens >= 2 * 32
    assert disk_of(after).num_failures == 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantised_blocks_come_back_with_their_scales(dtype: str, model: Path, root: str) -> None:
    options = {**DUMMY, "kv_cache_dtype": dtype}
    want, _ = run(model, **options)
    run(model, **options, prefix_cache_dir=root)
    warm, after = run(model, **options, prefix_cache_dir=root)
    assert warm == want
    assert disk_of(after).num_hit_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"kv_cache_dtype": "int8"},
        {"block_size": 8},
        {"quantization": "int8"},
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 9000.0}},
    ],
    ids=str,
)
def test_another_model_or_format_finds_nothing(
    change: dict[str, Any], model: Path, root: str
) -> None:
    run(model, **DUMMY, prefix_cache_dir=root)
    want, _ = run(model, **DUMMY, **change)
    found, stats = run(model, **DUMMY, **change, prefix_cache_dir=root)
    assert found == want
    assert disk_of(stats).num_loads == 0
    assert len(fingerprint_folders(Path(root))) == 2


def test_changed_weights_find_nothing(tmp_path: Path, root: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    SAVE["full"](folder)
    run(folder, prefix_cache_dir=root)
    (file,) = folder.glob("*.safetensors")
    times = file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    half = len(content) // 2
    content[half : half + 4096] = bytes(4096)
    file.write_bytes(content)
    os.utime(file, ns=(times, times))
    want, _ = run(folder)
    found, stats = run(folder, prefix_cache_dir=root)
    assert found == want
    assert disk_of(stats).num_loads == 0


def test_another_adapter_of_the_same_name_finds_nothing(tmp_path: Path, root: str) -> None:
    folder = write_model(tmp_path / "model")
    for seed, loads in ((1, False), (1, True), (2, False)):
        path = tmp_path / f"adapter-{seed}"
        if not path.exists():
            write_adapter(path, seed=seed)
        options = {**DUMMY, "enable_lora": True, "lora_modules": [f"a={path}"]}
        want, _ = run(folder, "a", **options)
        found, stats = run(folder, "a", **options, prefix_cache_dir=root)
        assert found == want
        assert (disk_of(stats).num_loads > 0) == loads


def test_two_engines_share_a_directory(model: Path, root: str) -> None:
    options = {**DUMMY, "prefix_cache_dir": root}
    with engine(model, **options) as other:
        want, _ = run(model, **options)
        end = time.monotonic() + 60
        while disk_of(other.engine.stats()).num_records < len(records(root)):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert generate(other) == want
        assert disk_of(other.engine.stats()).num_hit_tokens > 0


def test_records_that_another_engine_evicts_are_computed(model: Path, root: str) -> None:
    options = {**DUMMY, "prefix_cache_dir": root}
    want, _ = run(model, **options)
    with engine(model, **options) as built:
        for path in records(root):
            path.unlink()
        assert generate(built) == want
        assert disk_of(built.engine.stats()).num_corrupt == 0


def damage(root: str) -> None:
    """A wrong byte, a short file, an empty file, and files that are gone."""
    for number, path in enumerate(records(root)):
        content = bytearray(path.read_bytes())
        content[len(content) * number // 20 % len(content)] ^= 1
        if number % 4 == 0:
            path.unlink()
        else:
            path.write_bytes((content, content[:-1], b"")[number % 4 - 1])


def test_a_damaged_directory_changes_no_token(model: Path, root: str) -> None:
    options = {**DUMMY, "prefix_cache_dir": root}
    want, _ = run(model, **options)
    with engine(model, **options) as built:
        damage(root)  # the engine is running
        assert generate(built) == want
        found = disk_of(built.engine.stats())
        assert found.num_failures > 0
        assert found.num_corrupt > 0
        assert built.engine.stats().tier_decisions["failed"] > 0
    assert run(model, **options)[0] == want


def test_a_full_disk_changes_no_token(
    model: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("windlass.tiers.disk.os.writev", full)
    found, _ = run(model, **DUMMY, prefix_cache_dir=root)
    assert found == run(model, **DUMMY)[0]
    assert records(root) == []


_KILLED = """
    import json, os, signal, sys
    from windlass import LLM, SamplingParams

    model, root, num_left, block_size, prompts = (json.loads(arg) for arg in sys.argv[1:])
    real = os.writev

    def writev(descriptor, parts):
        global num_left
        num_left -= 1
        if num_left < 0:
            os.write(descriptor, b"".join(parts)[:1000])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, parts)

    os.writev = writev
    options = {"load_format": "dummy", "dtype": "float32", "num_blocks": 40, "device": "cpu"}
    llm = LLM(model, **options, block_size=block_size, prefix_cache_dir=root)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, deterministic=True))
"""


@pytest.mark.parametrize("num_writes", [0, 5])
def test_an_engine_that_is_killed_while_it_writes(num_writes: int, model: Path, root: str) -> None:
    given = [json.dumps(item) for item in (str(model), root, num_writes, SIZE, PROMPTS)]
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(records(root)) == num_writes
    want, _ = run(model, **DUMMY)
    found, stats = run(model, **DUMMY, prefix_cache_dir=root)
    assert found == want
    assert disk_of(stats).num_loads == num_writes
    assert disk_of(stats).num_corrupt == 0
    for folder in fingerprint_folders(Path(root)).values():
        assert writers_of(folder) == frozenset()
