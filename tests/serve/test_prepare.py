"""From bodies to engine requests: defaults, special tokens, bad words."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from tests.serve.fakes import BOS, CARD, Options, build_engine
from windlass.config import ServeConfig
from windlass.core.card import ModelCard
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest, Output, TokenLogprob
from windlass.errors import RequestError
from windlass.serve import messages
from windlass.serve.live_config import LiveConfig
from windlass.serve.prepare import Prepared, Preparer
from windlass.serve.protocol import ChatRequest, CompletionRequest
from windlass.serve.tenants import Tenant
from windlass.serve.workers import Workers
from windlass.text.chat_template import ChatTemplate
from windlass.text.template_worker import RenderJob

REPORT = build_engine(Options())[1]


class InProcess:
    """Renders in this process, for trusted templates."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def render(self, job: RenderJob) -> str:
        return self._template.render(
            job.messages, job.options, job.add_generation_prompt, job.continue_final
        )


def preparer_of(
    card: ModelCard = CARD, template: ChatTemplate | None = None, **options: Any
) -> Preparer:
    renderer = InProcess(template) if template is not None else None
    return Preparer(card, LiveConfig(ServeConfig(**options)), renderer, Workers())


def complete(preparer: Preparer, **body: Any) -> Prepared:
    raw = json.dumps({"prompt": "x", **body}).encode()
    return asyncio.run(preparer.completion(CompletionRequest.read(raw), REPORT))


def chat(preparer: Preparer, **body: Any) -> Prepared:
    raw = json.dumps({"messages": [{"role": "user", "content": "x"}], **body}).encode()
    return asyncio.run(preparer.chat(ChatRequest.read(raw), REPORT))


def test_defaults_of_the_model_override_those_of_the_engine() -> None:
    card = dataclasses.replace(CARD, default_sampling={"temperature": 0.6, "top_k": 20})
    preparer = preparer_of(card)
    sampling = complete(preparer, temperature=0.1).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.1, 20, 1.0)
    bad = dataclasses.replace(CARD, default_sampling={"temperature": -1.0})
    with pytest.raises(RequestError, match="temperature"):
        preparer_of(bad)


def test_completions_have_their_own_seeds_and_ids() -> None:
    prepared = complete(preparer_of(), n=3, seed=7)
    assert [request.sampling.seed for request in prepared.requests] == [7, 8, 9]
    assert [r.request_id for r in prepared.requests] == [
        f"{prepared.response_id}-{i}" for i in range(3)
    ]


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    sampling = complete(preparer_of(), bad_words=["no"]).sampling
    assert sampling.bad_token_ids == (tuple(b"no"), tuple(b" no"))


def test_bos_is_never_doubled() -> None:
    card = dataclasses.replace(CARD, special_tokens={"bos_token": "<s>"})
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", card.special_tokens)
    preparer = preparer_of(card, template)
    assert BOS not in chat(preparer, add_special_tokens=True).prompts[0].tokens
    bare = preparer_of(card, ChatTemplate("{{ messages[0].content }}", {}))
    assert chat(bare, add_special_tokens=True).prompts[0].tokens[0] == BOS
    assert BOS not in chat(bare).prompts[0].tokens


def test_logprobs_without_a_limit() -> None:
    preparer = preparer_of(max_logprobs=-1)
    assert complete(preparer, logprobs=-1).sampling.logprobs == -1


def test_long_texts_are_encoded_in_a_thread_with_the_same_result() -> None:
    preparer = preparer_of()
    text = "word " * 1500
    assert asyncio.run(preparer.encode(text, True, REPORT)) == CARD.tokenizer.encode(text)


def test_engine_messages_survive_encoding() -> None:
    sampling = SamplingParams(
        logit_bias={5: 1}, stop=["a"], bad_token_ids=((1, 2),), seed=-5, max_tokens=None
    )
    request = NewRequest("r", [1, 2], sampling, 3, "salt", tenant="t", weight=2.5)
    sent = [messages.Add(request), messages.Abort("q")]
    assert messages.decode_to_engine(messages.encode(sent)) == sent
    logprob = TokenLogprob(5, float("-inf"), 1, [(5, -0.5)])
    back = [messages.Outputs([Output("r", [5], [logprob], finish="stop")]), messages.Ready(REPORT)]
    assert messages.decode_from_engine(messages.encode(back)) == back


def test_requests_carry_their_tenant() -> None:
    tenant = Tenant(name="shop", weight=2.5)
    body = CompletionRequest.read(b'{"prompt": "x", "n": 2}')
    prepared = asyncio.run(preparer_of().completion(body, REPORT, tenant))
    assert {(each.tenant, each.weight) for each in prepared.requests} == {("shop", 2.5)}
