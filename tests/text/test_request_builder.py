"""The request builder: encoding, defaults, token ids, limits and child requests."""

from __future__ import annotations

import dataclasses

import pytest

from tests.serve.fakes import BOS, CARD, Options, build_engine
from windlass.core.card import ModelCard
from windlass.core.pooling import PoolingParams
from windlass.core.sampling import SamplingParams
from windlass.core.scheduler import Scheduler
from windlass.core.types import NewRequest
from windlass.errors import CapacityError, RequestError
from windlass.text.request_builder import EncodedPrompt, RequestBuilder, RequestOptions

REPORT = build_engine(Options(max_model_len=32))[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def builder(card: ModelCard = CARD) -> RequestBuilder:
    return RequestBuilder(card, REPORT)


def test_texts_and_token_ids_keep_their_order() -> None:
    given = [7, 8]
    prompts = builder().encode_prompts(["ab", given, "c"], add_special=False)
    assert [prompt.tokens for prompt in prompts] == [[97, 98], [7, 8], [99]]
    assert [prompt.text for prompt in prompts] == ["ab", None, "c"]
    assert prompts[1].tokens is not given


def test_a_text_with_too_many_characters_is_refused_before_it_is_encoded() -> None:
    class NoEncoding(type(CARD.tokenizer)):  # type: ignore[misc]
        def encode_all(self, *_: object) -> list[list[int]]:
            raise AssertionError

    card = dataclasses.replace(CARD, tokenizer=NoEncoding())
    with pytest.raises(CapacityError, match=r"129 characters.*32 tokens.*4 characters.*128 in all"):
        builder(card).encode(["x" * 129])
    assert len(builder().encode(["x" * 128])[0]) == 129  # with BOS; `fit` refuses it


def test_bos_of_a_rendered_template_is_not_doubled() -> None:
    card = dataclasses.replace(CARD, special_tokens={"bos_token": "<s>"})
    with_bos, without = builder(card).encode_rendered(["<s>a", "a"], add_special=True)
    assert BOS not in with_bos
    assert without == [BOS, 97]
    assert builder(card).encode_rendered(["a"]) == [[97]]


def test_given_fields_override_the_models_defaults() -> None:
    card = dataclasses.replace(CARD, default_sampling={"temperature": 0.6, "top_k": 20})
    sampling = builder(card).sampling({"temperature": 0.1}, max_tokens=None)
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.1, 20, None)
    assert builder(card).sampling({}) == SamplingParams(temperature=0.6, top_k=20)


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    sampling = builder().resolve(SamplingParams(bad_words=["no"]))
    assert sampling.bad_token_ids == ((110, 111), (32, 110, 111))


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {300: 1.0}}, {"allowed_token_ids": [300]}, {"stop_token_ids": [300]}],
)
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"300.*0 to 257") as caught:
        builder().resolve(SamplingParams(**fields))
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("token", [-1, 258])
def test_prompt_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=rf"prompt has the token id {token};"):
        builder().fit(EncodedPrompt([0, token]), GREEDY)


def test_structured_outputs_need_an_eos_token() -> None:
    class NoEos(type(CARD.tokenizer)):  # type: ignore[misc]
        eos_ids = ()

    card = dataclasses.replace(CARD, tokenizer=NoEos())
    with pytest.raises(RequestError, match="structured_outputs needs a token that ends"):
        builder(card).resolve(SamplingParams(structured_outputs={"regex": "a"}))


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens"), [(0, 4), (32, None), (29, 4), (28, 4), (1, None)]
)
def test_refusals_are_those_of_the_scheduler(num_tokens: int, max_tokens: int | None) -> None:
    engine, report = build_engine(Options(max_model_len=32))
    scheduler: Scheduler = engine._scheduler
    sampling = SamplingParams(max_tokens=max_tokens)

    def error_of(act) -> str | None:  # type: ignore[no-untyped-def]
        try:
            act()
        except RequestError as error:
            return f"{type(error).__name__} {error.param}: {error}"
        return None

    tokens = [1] * num_tokens
    made = error_of(lambda: RequestBuilder(CARD, report).fit(EncodedPrompt(tokens), sampling))
    assert made == error_of(lambda: scheduler.add(NewRequest("r", tokens, sampling), 0.0))


@pytest.mark.parametrize(("truncate", "kept"), [(None, 20), (5, 5), (-1, 20), (30, 20)])
def test_truncation_keeps_the_last_tokens(truncate: int | None, kept: int) -> None:
    tokens = list(range(20))
    fitted = builder().fit(EncodedPrompt(tokens, "text"), GREEDY, truncate)
    assert fitted == EncodedPrompt(tokens[-kept:], "text")


def test_truncation_to_the_context_leaves_room_for_the_output() -> None:
    assert len(builder().fit(EncodedPrompt([1] * 99), GREEDY, -1).tokens) == 32 - 4
    with pytest.raises(RequestError, match="no tokens"):
        builder().fit(EncodedPrompt([1]), GREEDY, 0)


def test_each_completion_has_its_own_id_and_seed() -> None:
    prompts = [EncodedPrompt([1]), EncodedPrompt([2])]
    options = RequestOptions(adapter="a", priority=3, cache_salt="s", tenant="t", weight=2.0)
    requests = builder().requests("r", prompts, SamplingParams(n=2, seed=7), options)
    assert [request.request_id for request in requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert [request.prompt for request in requests] == [[1], [1], [2], [2]]
    assert [request.sampling.seed for request in requests] == [7, 8, 7, 8]
    assert {request.sampling.n for request in requests} == {1}
    assert {(r.adapter, r.priority, r.cache_salt) for r in requests} == {("a", 3, "s")}
    pooled = builder().pooling_requests("p", prompts, PoolingParams(), options)
    assert {(r.tenant, r.weight) for r in (*requests, *pooled)} == {("t", 2.0)}
