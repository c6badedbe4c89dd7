"""Beam search against transformers' `generate(num_beams=…)`, offline and in the server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.serve.conftest import Server, running, wait_until
from tests.serve.tiny_model import EOS, serving, write_tiny_model
from windlass import LLM, BeamSearchParams, RequestError, SamplingParams
from windlass.core.types import NewRequest
from windlass.text.beam_search import BeamSearch

PROMPTS = [[72, 101, 108, 108, 111], list(range(40, 75)), [7]]
# Tokens that end a sequence, so that some end early: likely ones of the tiny model.
CASES: list[dict[str, Any]] = [
    {"beam_width": 1, "max_tokens": 8},
    {"beam_width": 3, "max_tokens": 12},
    {"beam_width": 4, "max_tokens": 20, "early_stopping": True},
    {"beam_width": 4, "max_tokens": 20, "length_penalty": 2.0},
    {"beam_width": 4, "max_tokens": 20, "length_penalty": -1.0, "early_stopping": "never"},
    {"beam_width": 5, "max_tokens": 20, "length_penalty": 0.0, "early_stopping": "never"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", num_blocks=200, max_num_seqs=16)


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stops(reference: transformers.LlamaForCausalLM) -> tuple[int, ...]:
    """Tokens that likely sequences of the tiny model have at some place."""
    with torch.inference_mode():
        found = reference.generate(
            torch.tensor([PROMPTS[0]]), num_beams=4, max_new_tokens=12, do_sample=False
        )
    return (int(found[0, len(PROMPTS[0]) + 5]), int(found[0, len(PROMPTS[0]) + 8]))


def expected(
    reference: transformers.LlamaForCausalLM, prompt: list[int], stops: tuple[int, ...], **case: Any
) -> tuple[list[list[int]], list[float]]:
    width = case["beam_width"]
    with torch.inference_mode():
        found = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=case["max_tokens"],
            length_penalty=case.get("length_penalty", 1.0),
            early_stopping=case.get("early_stopping", False),
            do_sample=False,
            eos_token_id=[EOS, *stops],
            pad_token_id=EOS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        ends = [at for at, token in enumerate(row) if token in (EOS, *stops)]
        sequences.append(row[: ends[0] + 1] if ends else row)
    scores = found.sequences_scores.tolist() if width > 1 else []
    return sequences, scores


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("with_stops", [False, True], ids=["eos", "stop tokens"])
def test_sequences_are_those_of_transformers(
    llm: LLM,
    reference: transformers.LlamaForCausalLM,
    stops: tuple[int, ...],
    case: dict[str, Any],
    with_stops: bool,
) -> None:
    ids = stops if with_stops else ()
    results = llm.beam_search(PROMPTS, BeamSearchParams(**case, stop_token_ids=ids))
    num_ended = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        sequences, scores = expected(reference, prompt, ids, **case)
        assert [each.tokens for each in result.sequences] == sequences
        if scores:
            assert [each.score for each in result.sequences] == pytest.approx(scores, rel=1e-4)
        num_ended += sum(each.finish_reason == "stop" for each in result.sequences)
    favours_long = case.get("length_penalty", 1.0) > 1
    assert num_ended > 0 or not with_stops or case["beam_width"] == 1 or favours_long


def test_beams_share_the_blocks_of_their_prefix(llm: LLM) -> None:
    llm.engine.reset_prefix_cache()
    before = llm.engine.stats()
    prompt = [(7 * i) % 250 for i in range(160)]
    llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=5))
    after = llm.engine.stats()
    computed = after.num_prompt_tokens_computed - before.num_prompt_tokens_computed
    assert computed < 160 + 4 * 5 * 16 * 2
    assert after.num_steps - before.num_steps <= 6  # the beams of a round are one batch
    assert not llm.engine.has_work


def test_bad_params() -> None:
    for field in ({"beam_width": 0}, {"beam_width": 65}, {"beam_width": 2, "max_tokens": 0}):
        with pytest.raises(RequestError):
            BeamSearchParams(**field)
    with pytest.raises(RequestError, match="finite"):
        BeamSearchParams(beam_width=2, length_penalty=float("nan"))
    prompt = NewRequest("a", [1], SamplingParams())
    params = BeamSearchParams(beam_width=60, stop_token_ids=tuple(range(30)))
    with pytest.raises(RequestError, match="1,860 log probabilities"):
        BeamSearch(prompt, params, eos_ids=(), vocab_size=50_000)


def test_beams_belong_to_the_tenant_of_their_request() -> None:
    prompt = NewRequest("a", [1], SamplingParams(), tenant="t", weight=2.0)
    search = BeamSearch(prompt, BeamSearchParams(beam_width=2), eos_ids=(), vocab_size=50)
    assert [(beam.tenant, beam.weight) for beam in search.requests()] == [("t", 2.0)]


# ---- the server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as each:
        yield each


def test_the_server_gives_the_same_sequences(
    server: Server, llm: LLM, stops: tuple[int, ...]
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12, stop_token_ids=stops, logprobs=1)
    offline = llm.beam_search(PROMPTS, params)
    response = server.complete(
        prompt=PROMPTS,
        use_beam_search=True,
        n=2,
        best_of=4,
        max_tokens=12,
        temperature=0,
        stop_token_ids=list(stops),
        logprobs=1,
        return_token_ids=True,
    )
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    best = [sequence for result in offline for sequence in result.sequences[:2]]
    assert [choice["token_ids"] for choice in choices] == [each.tokens for each in best]
    assert [choice["text"] for choice in choices] == [each.text for each in best]
    assert [choice["finish_reason"] for choice in choices] == [each.finish_reason for each in best]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice, each in zip(choices, best, strict=True):
        scores = [entry.logprob for entry in each.logprobs]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-4)
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == sum(len(each.tokens) for each in best)
    assert server.metric("num_requests_running") == 0


def test_a_chat_with_beams(server: Server) -> None:
    response = server.chat(use_beam_search=True, n=3, max_tokens=6)
    assert len(response.json()["choices"]) == 3


def test_a_search_runs_beside_others_and_ends_with_its_client() -> None:
    with running() as counting:
        body = {"prompt": "SLOW", "use_beam_search": True, "n": 2, "max_tokens": 1000}

        def search() -> None:
            with pytest.raises(httpx.ReadTimeout):  # a step takes 10 ms
                httpx.post(f"{counting.url}/v1/completions", json=body, timeout=1.0)

        with ThreadPoolExecutor(1) as pool:
            searching = pool.submit(search)
            wait_until(lambda: counting.client.num_finished > 4)
            assert counting.complete(max_tokens=3).status_code == 200
            searching.result()
        wait_until(lambda: counting.http.get("/load").json()["server_load"] == 0)
        num_finished = counting.client.num_finished
        assert counting.complete(max_tokens=20).status_code == 200
        assert counting.client.num_finished == num_finished + 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "stop": ["a"]}, "stop"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "n": 100}, "best_of"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    response = server.complete(**fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
