"""The host tier in real engines: more conversations than the KV cache holds, and the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lora.folders import write_adapter, write_model
from tests.models import test_deepseek, test_granite_hybrid
from tests.models.comparison import save_tiny
from tests.models.test_networks import CASES as NETWORKS
from tests.runner.test_deterministic import CONFIG
from tests.runner.test_windows import make
from windlass.build import Built
from windlass.core.sampling import SamplingParams
from windlass.core.types import EngineStats, NewRequest
from windlass.errors import ConfigError
from windlass.runner.kv_copies import HostBlockCopies

COUNT = 4
TIER = {"kv_offload_gb": 0.01}


def save_dummy(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 100}))


SAVE: dict[str, Callable[[Path], object]] = {
    "full": lambda folder: save_tiny(*NETWORKS["qwen2"], folder),
    "window": lambda folder: save_tiny(*NETWORKS["mistral-window"], folder),
    "full and window": lambda folder: save_tiny(*NETWORKS["qwen2-window"], folder),
    "latent": lambda folder: test_deepseek.save("V2 Lite", folder),
    "state": lambda folder: test_granite_hybrid.save("dense", folder),
    "dummy": save_dummy,
}


def converse(
    built: Built, *, adapters: tuple[str, ...] = ("",), deterministic: bool = True
) -> dict[str, tuple[list[int], list[float]]]:
    """Two rounds of four conversations that begin alike; all tokens and log probabilities.

    Deterministic requests are the same to the bit, however their steps are shared.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=COUNT,
        ignore_eos=True,
        logprobs=1,
        deterministic=deterministic,
    )
    histories = [[3 + 5 * i % 89 for i in range(12)] + [7 + n] * 14 for n in range(4)]
    found: dict[str, tuple[list[int], list[float]]] = {}
    engine = built.engine
    for turn in range(2):
        for number, history in enumerate(histories):
            adapter = adapters[number % len(adapters)]
            engine.add(NewRequest(f"{turn}.{number}", list(history), params, adapter=adapter))
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                histories[int(output.request_id[-1])] += output.tokens
                tokens, scores = found.setdefault(output.request_id, ([], []))
                tokens += output.tokens
                scores += [score.logprob for score in output.logprobs or ()]
        for history in histories:
            history += [turn, 40 + turn]
    return found


def stats_of(built: Built) -> EngineStats:
    stats = built.engine.stats()
    built.close()
    return stats


def compare(folder: Path, *, num_blocks: int, **options: Any) -> EngineStats:
    """Run the conversations without tiers and with the host tier, and compare all bits."""
    run = options.pop("run", {})
    options = {"dtype": "float32", "max_num_seqs": 2, "num_blocks": num_blocks, **options}
    plain = make(folder, **options)
    want = converse(plain, **run)
    stats_of(plain)
    built = make(folder, **options, **TIER)
    assert converse(built, **run) == want
    stats = stats_of(built)
    assert stats.tiers[0].num_loads > 0
    assert stats.tiers[0].num_hit_tokens > 0
    assert stats.tiers[0].num_failures == 0
    assert stats.tier_decisions["loaded"] > 0
    return stats


@pytest.mark.parametrize(
    ("case", "num_blocks"),
    [("full", 20), ("window", 13), ("full and window", 40), ("latent", 20), ("state", 40)],
)
def test_the_host_tier_changes_no_bit(case: str, num_blocks: int, tmp_path: Path) -> None:
    SAVE[case](tmp_path)
    compare(tmp_path, num_blocks=num_blocks)


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}], ids=str
)
def test_quantised_blocks_come_back_with_their_scales(
    options: dict[str, Any], tmp_path: Path
) -> None:
    save_dummy(tmp_path)
    compare(tmp_path, num_blocks=20, load_format="dummy", **options)


def test_ngram_drafts_change_nothing(tmp_path: Path) -> None:
    save_dummy(tmp_path)
    compare(tmp_path, num_blocks=20, load_format="dummy", spec="ngram")


def test_adapters_do_not_share_records(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    modules = [f"{name}={write_adapter(tmp_path / name, seed=n)}" for n, name in enumerate("ab")]
    lora = {"enable_lora": True, "lora_modules": modules, "max_loras": 2, "max_lora_rank": 8}
    run = {"adapters": ("", "a", "b")}
    compare(model, num_blocks=20, load_format="dummy", run=run, **lora)


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_copy_that_fails_leaves_no_request_waiting(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_dummy(tmp_path)
    options = {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 2, "num_blocks": 20}
    plain = make(tmp_path, **options)
    want = converse(plain)
    stats_of(plain)
    built = make(tmp_path, **options, **TIER)
    copy = getattr(HostBlockCopies, name)

    def fail(*_: object) -> None:
        monkeypatch.setattr(HostBlockCopies, name, copy)  # the next one works
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(HostBlockCopies, name, fail)
    assert converse(built) == want
    (stats,) = stats_of(built).tiers
    assert stats.num_refused + stats.num_failures > 0


def test_a_tier_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    save_dummy(tmp_path)
    with pytest.raises(ConfigError, match=r"one KV block takes .*Set a larger size"):
        make(tmp_path, load_format="dummy", num_blocks=20, kv_offload_gb=1e-6)


def test_a_reset_empties_the_tier(tmp_path: Path) -> None:
    save_dummy(tmp_path)
    built = make(tmp_path, load_format="dummy", dtype="float32", num_blocks=20, **TIER)
    want = converse(built)
    assert built.engine.stats().tiers[0].num_records > 0
    built.engine.reset_prefix_cache()
    assert built.engine.stats().tiers[0].num_records == 0
    assert converse(built) == want
    built.close()


def test_sleep_keeps_the_tier(tmp_path: Path) -> None:
    save_dummy(tmp_path)
    built = make(tmp_path, load_format="dummy", dtype="float32", num_blocks=20, **TIER)
    want = converse(built)
    built.engine.sleep()
    built.engine.wake()
    assert built.engine.stats().tiers[0].num_records > 0
    assert converse(built) == want
    built.close()
