"""Speculation on the default model: the same answers and the same distribution."""

from __future__ import annotations

from random import Random

import pytest
import torch

from windlass import LLM, SamplingParams
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.speculation import governor
from windlass.core.speculation.costs import Costs, StepCosts
from windlass.core.types import SlotInit
from windlass.measurement_cache import MeasurementCache
from windlass.runner.sampler import Sampler
from windlass.runner.verify import SampleRequest, verify
from windlass.speculative import setup

TEXT = "Two boats lay at the pier, and a gull walked along the rail."
MESSAGES = [{"role": "user", "content": f"Repeat the following text exactly: {TEXT}"}]


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    """Engines that share the weights; every draft token is verified."""
    found = {}
    weights = None
    with pytest.MonkeyPatch.context() as patch:
        some = StepCosts({1: 1.0, 2: 1.0})
        patch.setattr(setup, "measure", lambda *_: Costs(some, some))
        patch.setattr(
            setup, "open_measurement_cache", lambda *_args, **_options: MeasurementCache()
        )
        for spec in ("none", "ngram", "self"):
            own = {"spec_exit_layer": 20} if spec == "self" else {}
            config = EngineConfig.of(spec=spec, num_blocks=64, device="cpu", **own)
            opened = open_model(config)
            built = build_engine(config, opened.source, weights)
            weights = built.weights
            found[spec] = LLM.over(opened.card, built)
    return found


@pytest.fixture(autouse=True)
def verify_all(monkeypatch) -> None:
    monkeypatch.setattr(
        governor.Governor,
        "choose",
        lambda _self, _slots, drafts, *_: [len(d.tokens) for d in drafts],
    )
    monkeypatch.setattr(governor.Governor, "draft_length", lambda self, *_: self._max_draft_tokens)


@pytest.mark.parametrize("spec", ["ngram", "self"])
def test_the_same_answers(llms: dict[str, LLM], spec: str) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, stop=["pier", "gull"]),
        SamplingParams(max_tokens=12, temperature=0.8, seed=7, logprobs=1),
    ]
    answers = {}
    for name in ("none", spec):
        outputs = [llms[name].chat(MESSAGES, each)[0].outputs[0] for each in params]
        answers[name] = [(each.text, each.token_ids, each.finish_reason) for each in outputs]
    assert answers[spec] == answers["none"]
    assert llms[spec].engine.stats().num_accepted_tokens > 1
    assert llms["none"].engine.stats().num_drafts == 0


@pytest.mark.slow
def test_verification_keeps_the_distribution_of_the_first_token(llms: dict[str, LLM]) -> None:
    """20,000 draws from the logits after a real prompt, among its 255 likeliest tokens."""
    size, draws, batch_size = 255, 20_000, 2000
    params = SamplingParams(max_tokens=1, logprobs=size)
    scores = llms["none"].generate(["The harbour was quiet, and"], params)[0].outputs[0].logprobs
    assert scores is not None
    logits = torch.tensor([value for _, value in scores[0].top])
    want = logits.softmax(-1)
    rng, counts = Random(2), torch.zeros(size)
    for batch in range(draws // batch_size):
        sampler = Sampler(size, torch.device("cpu"))
        requests = []
        for slot in range(batch_size):
            seed = batch_size * batch + slot
            sampler.admit(SlotInit("", slot, [0], 1, SamplingParams(), frozenset(), seed))
            requests.append(
                SampleRequest(slot, slot, (min(rng.randrange(4), rng.randrange(size)),), 1)
            )
        for result in verify(sampler, logits.expand(2 * batch_size, size), requests):
            counts[result.tokens[0]] += 1
    often = want * draws >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    want = draws * torch.cat([want[often], want[~often].sum()[None]])
    chi_square = float(((counts - want) ** 2 / want).sum())
    freedom = len(want) - 1
    # The 99.9 % point, as Wilson and Hilferty approximate it.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
