"""Features with tensor and pipeline ranks, as real processes: the results of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from tests.lora.folders import CONFIG, write_adapter
from tests.models import test_granite_hybrid
from tests.parallel.pool import pooled_ranks
from tests.parallel.test_matrix import (
    BASE,
    FAMILIES,
    FEW,
    GREEDY,
    PROMPTS,
    assert_equal,
    family,
    make,
    results,
)
from tests.runner import test_reasoning_budget
from tests.speculative import test_mtp
from tests.speculative.test_speculation import verify_all
from tests.tools.plan.test_scaling import MLA, model_of, step_work
from windlass import LLM, BeamSearchParams, SamplingParams
from windlass.core.speculation import governor
from windlass.core.types import Draft, StepPlan, TierStats, TokenLogprob
from windlass.models.rank_weights import RankShape
from windlass.runner.collectives import SharedMemoryGroup
from windlass.runner.kv_tiers import KVTiers
from windlass.tiers.disk_files import fingerprint_folders, read_description

__all__ = ["verify_all"]

MESHES: dict[str, dict[str, Any]] = {
    "tp": {"size": 2},
    "pp": {"size": 1, "pipeline_parallel_size": 2},
    "tp x pp": {"size": 2, "pipeline_parallel_size": 2},
}
VOCAB = test_reasoning_budget.VOCAB
Found = tuple[Any, list[float]]  # compared as they are, and as numbers


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[None]:
    with pooled_ranks():
        yield


def add_tokenizer(folder: Path) -> None:
    words = {f"t{i}": i for i in range(test_mtp.VOCAB)}
    Tokenizer(WordLevel(words, "t0")).save(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.usefixtures("verify_all")
@pytest.mark.parametrize("case", test_mtp.CASES)
def test_mtp_layers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time, so that steps and draft tokens are the same with every mesh."""
    test_mtp.save(case, tmp_path)
    add_tokenizer(tmp_path)
    drafts: list[tuple[int, ...]] = []
    choose = governor.Governor.choose

    def recorded(self: Any, slots: Any, given: Sequence[Draft], *rest: Any) -> list[int]:
        drafts.extend(tuple(draft.tokens) for draft in given if draft.tokens)
        return choose(self, slots, given, *rest)

    monkeypatch.setattr(governor.Governor, "choose", recorded)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
    plain = results(make(tmp_path, 1), sampling)
    found = []
    for mesh in ({"size": 1}, MESHES["tp"], MESHES["pp"]):
        llm = make(tmp_path, **mesh, spec="mtp", spec_tokens=2, max_num_seqs=1)
        assert_equal(results(llm, sampling), plain)
        found.append(drafts.copy())
        drafts.clear()
    assert len(found[0]) > len(PROMPTS)
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["experts", "groups"])
def test_recurrent_states(case: str, tmp_path: Path) -> None:
    """With chunked prompts, prefix hits and preempted requests, which go on from the state of a block."""
    test_granite_hybrid.save(case, tmp_path)
    add_tokenizer(tmp_path)
    want = results(make(tmp_path, 1, num_blocks=400, block_size=4))
    for mesh in MESHES.values():
        llm = make(tmp_path, **mesh, **FEW, num_blocks=64, block_size=4)
        assert_equal(results(llm), want)
        assert llm.engine.stats().num_preemptions
        for _ in range(2):
            (again,) = llm.generate(PROMPTS[:1], GREEDY)
            assert again.outputs[0].token_ids == want[0][0]
        assert llm.engine.stats().prefix_hits


@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_every_rank_has_the_kv_records_of_its_slice(mesh: str, tmp_path: Path) -> None:
    """With a cache too small for all prompts, whose blocks come back from host memory."""
    family("dense", tmp_path)
    want = results(make(tmp_path, 1, load_format="dummy"))
    options = {"num_blocks": 12, "kv_offload_gb": 0.01, "load_format": "dummy", **FEW}
    llm = make(tmp_path, **MESHES[mesh], **options)
    for _ in range(3):
        assert_equal(results(llm), want)
    (tier,) = llm.engine.stats().tiers
    assert tier.num_loads > 0
    assert tier.num_failures == 0
    llm.engine.reset_prefix_cache()
    assert llm.engine.stats().tiers[0].num_records == 0
    assert_equal(results(llm), want)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp", "pp"])
def test_a_restart_finds_the_kv_records_of_every_rank(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that one rank has lost is a miss on all, until the ranks have saved it again."""
    # On a busy machine, computing these short prompts may be faster than loading them.
    monkeypatch.setattr(KVTiers, "record_s", lambda *_: 0.0)
    family("dense", tmp_path)
    want = results(make(tmp_path, 1, load_format="dummy"))
    root = tmp_path / "cache"
    options = {**MESHES[mesh], "load_format": "dummy", "prefix_cache_dir": str(root)}

    num_full = sum(len(prompt) // 16 for prompt in PROMPTS)

    def files() -> list[list[Path]]:
        """The records of each rank."""
        folders = sorted(
            fingerprint_folders(root).values(), key=lambda each: read_description(each)["rank"]
        )
        return [sorted(each.glob("*.kv")) for each in folders]

    def run() -> TierStats:
        """Of rank 0, when all ranks have stored their records."""
        llm = make(tmp_path, **options)
        assert_equal(results(llm), want)
        llm.engine.close()
        (disk,) = (each for each in llm.engine.stats().tiers if each.name == "disk")
        first, second = files()
        assert len(first) == num_full
        assert [each.name for each in first] == [each.name for each in second]
        return disk

    assert run().num_loads == 0
    warm = run()
    assert warm.num_hit_tokens == 16 * num_full
    assert warm.num_failures == 0
    for rank in (1, 0):
        for damage in (Path.unlink, lambda file: file.write_bytes(b"damaged")):
            for file in files()[rank]:
                damage(file)
            assert run().num_hit_tokens == 0
            again = run()
            assert again.num_hit_tokens == warm.num_hit_tokens
            assert again.num_failures == 0


@pytest.mark.parametrize(
    "config", [MLA, BASE | FAMILIES["heads of two sizes"]], ids=["latents", "heads of two sizes"]
)
def test_collectives_of_steps_are_those_of_the_formula(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[StepPlan, list[tuple[str, int]]]] = []

    def record(name: str, kind: str) -> None:
        method = getattr(SharedMemoryGroup, name)

        def recorded(self: SharedMemoryGroup, x: Tensor, *widths: Any) -> Tensor:
            found = method(self, x, *widths)
            if steps:
                steps[-1][1].append((kind, found.nbytes))
            return found

        monkeypatch.setattr(SharedMemoryGroup, name, recorded)

    record("all_reduce", "all-reduce")
    record("all_gather", "all-gather")
    formula = model_of(tmp_path, config, dtype="float32")
    llm = make(tmp_path, 2, load_format="dummy", max_num_batched_tokens=32)
    llm.engine.watch_plans(lambda plan: steps.append((plan, [])))
    llm.generate([list(range(50)), [5, 9, 2]], SamplingParams(max_tokens=4, ignore_eos=True))
    sizes = [
        (sum(row.num_tokens for row in plan.rows), sum(row.sample for row in plan.rows))
        for plan, _ in steps
    ]
    assert sizes == [(32, 0), (21, 2), (2, 2), (2, 2), (2, 2)]
    expected = [step_work(formula, RankShape(tp=2), *size) for size in sizes]
    assert [found for _, found in steps] == expected


def values_of(scores: Sequence[TokenLogprob | None]) -> list[float]:
    """The log probabilities of tokens and of all alternatives, these by token."""
    found = [score for score in scores if score is not None]
    assert all(len(score.top) == VOCAB for score in found)
    return [value for score in found for _, value in ((0, score.logprob), *sorted(score.top))]


def adapters(llm: LLM) -> Found:
    names = ["a", "", "a", "a"]
    found = results(llm, adapter=names)
    assert found[0] != results(llm)[0]
    return found


def all_logprobs(llm: LLM) -> Found:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    found = llm.generate(PROMPTS, sampling)
    scores = [[*(each.prompt_logprobs or ()), *(each.outputs[0].logprobs or ())] for each in found]
    assert [len(each) for each in scores] == [len(prompt) - 1 + 3 for prompt in PROMPTS]
    return [each.outputs[0].token_ids for each in found], values_of(list(chain(*scores)))


def embeddings(llm: LLM) -> Found:
    found = [llm.embed(PROMPTS, adapter=adapter) for adapter in ("", "a")]
    return None, [value for each in chain(*found) for value in each.outputs.embedding]


def beams(llm: LLM) -> Found:
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
    sequences = [each for output in found for each in output.sequences]
    return [each.tokens for each in sequences], [each.cum_logprob for each in sequences]


def predictions(llm: LLM) -> Found:
    plain = llm.generate(PROMPTS, GREEDY)
    before = llm.engine.stats()
    texts = [each.outputs[0].text for each in plain]
    found = results(llm, prediction=texts)
    after = llm.engine.stats()
    assert after.num_accepted_tokens > before.num_accepted_tokens
    return found


def thinking_budgets(llm: LLM) -> Found:
    budgets = (0, 7, 40, 50)
    common = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    sampling = [
        test_reasoning_budget.params(thinking_token_budget=budget, **common) for budget in budgets
    ]
    found = results(llm, sampling)
    end = list(test_reasoning_budget.END)
    for budget, tokens in zip(budgets, found[0], strict=True):
        assert tokens[budget : budget + len(end)] == end
    return found


FEATURES: list[Callable[[LLM], Found]] = [
    adapters,
    all_logprobs,
    embeddings,
    beams,
    predictions,
    thinking_budgets,
]


@dataclass(frozen=True)
class Model:
    """A model with an adapter, and the results of one process."""

    folder: Path
    options: dict[str, Any]
    want: list[Found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": VOCAB, "eos_token_id": test_reasoning_budget.EOS}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    modules = (f"a={write_adapter(folder / 'a')}",)
    options = {"load_format": "dummy", "enable_lora": True, "lora_modules": modules}
    llm = make(folder, 1, **options)
    return Model(folder, options, [feature(llm) for feature in FEATURES])


@pytest.mark.parametrize("mesh", MESHES)
def test_features(mesh: str, model: Model) -> None:
    llm = make(model.folder, **MESHES[mesh], **model.options, max_num_batched_tokens=32)
    for feature, want in zip(FEATURES, model.want, strict=True):
        assert_equal(feature(llm), want)
