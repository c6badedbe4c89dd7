"""Predicted outputs: the same tokens in fewer steps, with and without another proposer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest

from tests.serve.conftest import Server
from tests.serve.tiny_model import serving, write_tiny_model
from windlass import LLM, SamplingParams
from windlass.core.speculation.prediction import Prediction
from windlass.errors import RequestError

PROMPTS = ["Hello there", "A second prompt of another length", "x"]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 200}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{**OPTIONS, "max_num_seqs": 16, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return engine(folder)


def tokens_and_steps(
    llm: LLM, prediction: list[str] | str, **options: Any
) -> tuple[list[list[int]], int]:
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "temperature": 0.0, **options})
    before = llm.engine.stats().num_steps
    llm.engine.reset_prefix_cache()
    results = llm.generate(PROMPTS, params, prediction=prediction)
    tokens = [result.outputs[0].token_ids for result in results]
    return tokens, llm.engine.stats().num_steps - before


def text_of(llm: LLM, tokens: list[int]) -> str:
    return llm.card.tokenizer.decode(tokens, skip_special=False)


def edited(text: str, seed: int) -> str:
    """The text with some characters changed, removed and added."""
    chance, out = random.Random(seed), []
    for char in text:
        kind = chance.random()
        if kind > 0.15:
            out.append(char)
        elif kind > 0.1:
            out.append("?")
        elif kind > 0.05:
            out += [char, "!", "!"]
    return "".join(out)


SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 7},
    "penalties": {"repetition_penalty": 1.3},
    "logprobs": {"logprobs": 1},
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING)
def test_the_same_tokens_in_fewer_steps(llm: LLM, options: dict[str, Any]) -> None:
    plain, num_plain = tokens_and_steps(llm, "", **options)
    texts = [text_of(llm, tokens) for tokens in plain]
    found, num_steps = tokens_and_steps(llm, texts, **options)
    assert found == plain
    assert num_steps < num_plain
    for seed in range(3):
        found, _ = tokens_and_steps(llm, [edited(text, seed) for text in texts], **options)
        assert found == plain


@pytest.mark.parametrize(
    "options",
    [{"spec": "ngram"}, {"spec": "lookahead"}, {"enforce_eager": True}, {"max_num_seqs": 2}],
    ids=str,
)
def test_other_proposers_and_executors(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    plain, _ = tokens_and_steps(llm, "")
    texts = [text_of(llm, tokens) for tokens in plain]
    other = engine(folder, **options)
    for seed in (None, 1):
        given = texts if seed is None else [edited(text, seed) for text in texts]
        found, _ = tokens_and_steps(other, given)
        assert found == plain
    monkeypatch.setattr(other.engine, "_max_in_flight", 2)  # plans run ahead of commits, as on CUDA
    assert tokens_and_steps(other, texts)[0] == plain


def test_a_wrong_prediction_changes_nothing(llm: LLM) -> None:
    plain, _ = tokens_and_steps(llm, "")
    found, _ = tokens_and_steps(llm, "Nothing of this is going to be said. " * 3)
    assert found == plain


def test_a_step_samples_at_most_max_num_seqs_positions(folder: Path, llm: LLM) -> None:
    small = engine(folder, max_num_seqs=4)
    widths = []
    small.engine.watch_plans(
        lambda plan: widths.append(sum(row.sample + row.num_drafts for row in plan.rows))
    )
    plain, _ = tokens_and_steps(llm, "")
    assert tokens_and_steps(small, [text_of(llm, tokens) for tokens in plain])[0] == plain
    assert max(widths) == 4


# ---- following -----------------------------------------------------------------------------------


def test_the_length_of_drafts_grows_while_they_are_accepted() -> None:
    prediction = Prediction(range(100))
    lengths = []
    for _ in range(5):
        draft = prediction.draft()
        lengths.append(len(draft))
        prediction.verified(len(draft), len(draft))
        prediction.advance(draft)
    assert lengths == [4, 8, 16, 32, 32]
    assert prediction.draft() == tuple(range(92, 100))


def test_the_output_is_found_again_after_an_insertion_and_after_a_deletion() -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7, 1, 2, 8, 9])
    prediction.advance([1, 2, 50, 51])
    assert prediction.draft() == ()
    prediction.advance([3, 4])
    assert prediction.draft() == (5, 6, 7, 1)
    prediction.advance([1, 2])  # the next place with these tokens, not the first
    assert prediction.draft() == (8, 9)
    prediction.advance([8, 9])
    assert not prediction.is_followed


def test_a_long_prediction_is_read_as_far_as_the_output_may_reach_soon() -> None:
    prediction = Prediction(range(10_000))
    prediction.advance([-1, 5000, 5001])
    assert prediction.draft() == ()
    prediction.advance([1900, 1901])
    assert prediction.draft()[:2] == (1902, 1903)
    prediction.advance([3800, 3801])
    assert prediction.draft()[:2] == (3802, 3803)


def test_rejected_drafts_demand_longer_matches() -> None:
    prediction = Prediction([1, 2, 3, 4, 5, 6, 7])
    prediction.verified(4, 0)
    prediction.advance([9, 3, 4])
    assert prediction.draft() == ()
    prediction.advance([9, 2, 3, 4])
    assert prediction.draft() == (5, 6, 7)


def test_the_number_of_predictions_is_checked(llm: LLM) -> None:
    with pytest.raises(RequestError, match="3 prompts, but 2 predictions"):
        llm.generate(PROMPTS, prediction=["a", "b"])


# ---- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, max_num_seqs=16) as each:
        yield each


def test_prediction_with_the_openai_client(server: Server) -> None:
    client, model = server.openai, server.http.get("/v1/models").json()["data"][0]["id"]
    # The tiny model's bytes are not UTF-8 otherwise.
    letters = server.http.post("/tokenize", json={"prompt": ascii_letters}).json()["tokens"]
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_completion_tokens": 60,
        "temperature": 0,
        "extra_body": {"allowed_token_ids": letters},
    }
    plain = client.chat.completions.create(**request)
    text = plain.choices[0].message.content
    again = client.chat.completions.create(
        **request, prediction={"type": "content", "content": [{"type": "text", "text": text}]}
    )
    assert again.choices[0].message.content == text
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 40
    assert details.rejected_prediction_tokens is not None
    wrong = client.chat.completions.create(
        **request, prediction={"type": "content", "content": "~~~~~~"}
    )
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_bad_predictions(server: Server) -> None:
    for value in ("text", {"type": "image", "content": "a"}, {"type": "content", "content": 5}):
        response = server.chat(prediction=value)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("prediction")
    response = server.chat(prediction={"type": "content", "content": "a" * 2**20})
    assert response.status_code == 400
    assert "characters" in response.json()["error"]["message"]
