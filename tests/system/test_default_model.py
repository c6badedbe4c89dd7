"""The default model in float32: greedy tokens equal those of transformers from the same file.

With small steps, prefix caching, preemption, HTTP and streaming.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import torch

from tests.system.server import Server, serving
from windlass import LLM, SamplingParams
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.runner.load import Loaded

pytestmark = pytest.mark.model

NUM_TOKENS = 24  # with the prompts, every sequence crosses two block boundaries
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
    "The three laws of robotics are",
    "In 1969, two men",
    "Water boils at",
    "Q: What is 12 + 30?\nA:",
    "The difference between a crocodile and an alligator is",
    "Le chat est",
    "1, 2, 3, 5, 8, 13,",
]


Exact = Callable[..., LLM]


@pytest.fixture(scope="module")
def exact() -> Exact:
    """Make engines in float32 that share the weights."""
    shared: list[Loaded] = []

    def make(**options: Any) -> LLM:
        config = EngineConfig.of(dtype="float32", **options)
        opened = open_model(config)
        built = build_engine(config, opened.source, *shared)
        shared[:] = [built.weights]
        return LLM.over(opened.card, built)

    return make


@pytest.fixture(scope="module")
def expected(default_reference: torch.nn.Module, exact: Exact) -> dict[str, list[int]]:
    """Greedy tokens of the engine, each of them checked against transformers."""
    llm = exact(max_model_len=1024, num_blocks=512)
    results = llm.generate(PROMPTS, GREEDY)
    for result in results:
        prompt, tokens = result.prompt_token_ids, result.outputs[0].token_ids
        assert len(tokens) == NUM_TOKENS
        ids = torch.tensor([prompt + tokens])
        with torch.inference_mode():
            choices = default_reference(ids).logits[0].argmax(-1).tolist()
        # The argmax of transformers after every prefix of our output, so by induction its whole output.
        assert choices[len(prompt) - 1 : -1] == tokens, result.prompt
    return {result.prompt: result.outputs[0].token_ids for result in results}


def test_packed_weights_differ_only_near_ties(default_reference, expected) -> None:
    """Default settings: packed weights, 8-bit activations. At the first token that differs from the
    reference, the reference's two highest logits are less than 0.5 apart."""
    llm = LLM(max_model_len=256, num_blocks=256)
    same = 0
    for result in llm.generate(PROMPTS, GREEDY):
        tokens, want = result.outputs[0].token_ids, expected[result.prompt]
        apart = next((i for i in range(NUM_TOKENS) if tokens[i] != want[i]), NUM_TOKENS)
        same += apart
        if apart < NUM_TOKENS:
            ids = torch.tensor([result.prompt_token_ids + want[:apart]])
            with torch.inference_mode():
                best = default_reference(ids).logits[0, -1].topk(2).values
            assert best[0] - best[1] < 0.5, (result.prompt, apart)
    assert same > 0.3 * NUM_TOKENS * len(PROMPTS)


def test_generate_of_transformers_gives_the_same_tokens(default_reference, expected) -> None:
    prompt = PROMPTS[1]
    ids = torch.tensor([open_model(EngineConfig()).card.tokenizer.encode(prompt)])
    with torch.inference_mode():
        out = default_reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert out[0, ids.shape[1] :].tolist() == expected[prompt]


def test_batches_of_8_in_steps_of_24_tokens(exact: Exact, expected) -> None:
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "prefix_caching": False}
    llm = exact(max_model_len=512, num_blocks=512, **small)
    for result in llm.generate(PROMPTS, GREEDY):
        assert result.outputs[0].token_ids == expected[result.prompt], result.prompt
    assert llm.engine.stats().num_used_blocks == 0


def test_preemption_with_few_blocks(exact: Exact, expected) -> None:
    """A prompt is then repeated; its first block is still cached."""
    tight = {"max_model_len": 224, "num_blocks": 14, "max_num_batched_tokens": 48}
    llm = exact(max_num_seqs=16, **tight)
    for prompts in (PROMPTS, [PROMPTS[-1]]):
        for result in llm.generate(prompts, GREEDY):
            assert result.outputs[0].token_ids == expected[result.prompt], result.prompt
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.num_used_blocks == 0


def test_a_seed_gives_the_same_alone_and_in_a_batch() -> None:
    llm = LLM(max_model_len=256, num_blocks=256)
    sampling = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=16, seed=11)
    alone = llm.generate(PROMPTS[0], sampling)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.0, max_tokens=16) for _ in PROMPTS[1:6]]
    batch = llm.generate(PROMPTS[:6], [sampling, *others])
    assert batch[0].outputs[0].token_ids == alone


def test_logprobs_agree_with_transformers(default_reference, exact: Exact) -> None:
    llm = exact(max_model_len=256, num_blocks=64)
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=5, prompt_logprobs=0)
    result = llm.generate(PROMPTS[1], sampling)[0]
    ids = result.prompt_token_ids + result.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = default_reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    at = len(result.prompt_token_ids) - 1
    for i, score in enumerate(result.outputs[0].logprobs):
        assert score.logprob == pytest.approx(float(logprobs[at + i, score.token]), abs=1e-3)
        assert [t for t, _ in score.top] == logprobs[at + i].topk(5).indices.tolist()
    want = [float(logprobs[i, ids[i + 1]]) for i in range(at)]
    assert [s.logprob for s in result.prompt_logprobs] == pytest.approx(want, abs=1e-3)


@pytest.fixture(scope="module")
def server() -> Server:
    exact = ("--dtype", "float32")
    with serving("--max-model-len", "2048", "--max-num-batched-tokens", "256", *exact) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_http_responses_streamed_and_not(client: openai.OpenAI, expected) -> None:
    model = client.models.list().data[0].id
    options = {"model": model, "temperature": 0, "max_tokens": NUM_TOKENS}
    extra = {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
    tokenizer = open_model(EngineConfig()).card.tokenizer
    texts = {p: tokenizer.decode(ids, skip_special=False) for p, ids in expected.items()}
    half = len(PROMPTS) // 2
    whole = client.completions.create(prompt=PROMPTS[:half], extra_body=extra, **options)
    answers = {PROMPTS[choice.index]: choice.text for choice in whole.choices}
    assert whole.usage.completion_tokens == NUM_TOKENS * half
    answers |= dict.fromkeys(PROMPTS[half:], "")
    for chunk in client.completions.create(
        prompt=PROMPTS[half:], stream=True, extra_body=extra, **options
    ):
        for choice in chunk.choices:
            answers[PROMPTS[half + choice.index]] += choice.text
    assert answers == texts


def metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(f"windlass:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_shared_prefix_of_512_tokens_is_computed_once(client: openai.OpenAI, server) -> None:
    model = "default"  # a further name of the default model
    assert [each.id for each in client.models.list()] == ["SmolLM2-135M-Instruct", model]
    random = Random(5)
    prefix = [random.randrange(1000, 40000) for _ in range(512)]
    first = client.completions.create(model=model, prompt=[*prefix, 7, 8], max_tokens=1)
    hits = metric(server, "prefix_cache_hits_total")
    second = client.completions.create(model=model, prompt=[*prefix, 9, 10, 11], max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 512
    assert metric(server, "prefix_cache_hits_total") - hits == 512


def test_a_chat_completion_is_correct(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=32,
        temperature=0,
    )
    assert "Paris" in answer.choices[0].message.content


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int
    tags: list[Literal["tall", "kind", "old"]] = pydantic.Field(max_length=2)


def test_responses_satisfy_a_schema(client: openai.OpenAI) -> None:
    """Through the OpenAI client, beside a request without a schema."""
    model = client.models.list().data[0].id
    asked = [{"role": "user", "content": "Describe a person: name, age and tags."}]
    with client.chat.completions.create(
        model=model, messages=asked, max_tokens=40, stream=True
    ) as free:
        answer = client.chat.completions.parse(
            model=model, messages=asked, response_format=Person, max_tokens=100, temperature=0
        )
        assert sum(1 for _ in free) > 20
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert answer.choices[0].finish_reason == "stop"
    extra = {"structured_outputs": {"choice": ["crimson", "navy blue"]}}
    body = {"model": model, "prompt": "The sky is", "extra_body": extra}
    assert client.completions.create(**body).choices[0].text in ("crimson", "navy blue")


def test_requests_of_disconnected_clients_are_aborted(server: Server) -> None:
    """60 clients, most of which disconnect at a random time."""
    random = Random(9)
    body = {"prompt": "Write a long text about the sea.", "max_tokens": 200, "stream": True}

    def disconnect_soon() -> None:
        timeout = httpx.Timeout(30, read=random.uniform(0.001, 0.4))
        try:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=timeout
            ) as r:
                for _ in zip(range(random.randrange(4)), r.iter_lines(), strict=False):
                    pass
        except httpx.TimeoutException:
            pass

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(20) as pool:
        for future in [pool.submit(disconnect_soon) for _ in range(60)]:
            future.result()
    import time

    deadline = time.monotonic() + 30
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while any(metric(server, name) for name in names):
        assert time.monotonic() < deadline, "requests of disconnected clients are still running"
        time.sleep(0.1)
    assert httpx.get(f"{server.url}/health/generate", timeout=30).status_code == 200
    total = metric(server, "requests_received_total")
    assert total == metric(server, "request_outcomes_total")
