"""Embeddings and scores of the engine are those of transformers' hidden states."""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.lora.folders import write_adapter, write_model
from tests.parallel.stages import staged
from tests.pooling_models import (
    CONTEXT,
    HIDDEN,
    add_modules,
    change_config,
    hidden_states,
    save_model,
    vector,
)
from windlass import LLM, SamplingParams
from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.core.pooling import PoolingParams
from windlass.core.types import NewRequest
from windlass.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    UnsupportedError,
)

OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "num_threads": 1}
PROMPTS = [[5, 7, 9], list(range(3, 90)), [11], [8] * 33, list(range(40, 3, -1))]


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(
        str(folder), **(OPTIONS | {"max_num_batched_tokens": 32, "max_num_seqs": 4}), **options
    )


def embedded(llm: LLM, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    return torch.tensor([each.outputs.embedding for each in llm.embed(prompts, **options)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder)


# The native kernels keep keys and values in 16 bits.
EXECUTORS: dict[str, tuple[dict[str, Any], float]] = {
    "program": ({}, 1e-3),
    "eager": ({"dtype": "float32"}, 1e-5),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_embeddings_are_those_of_transformers(
    pooling_type: str, executor: str, model: tuple[Path, torch.nn.Module]
) -> None:
    folder, reference = model
    options, tolerance = EXECUTORS[executor]
    llm = llm_of(folder, pooling_type=pooling_type, **options)
    want = torch.stack([vector(reference, prompt, pooling_type) for prompt in PROMPTS])
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(embedded(llm, PROMPTS), want, **close)
    assert llm.engine.stats().executors.keys() == {executor}
    again = llm.embed(PROMPTS)
    torch.testing.assert_close(
        torch.tensor([each.outputs.embedding for each in again]), want, **close
    )
    # Mean pooling reads all hidden states, so it computes the cached prefix again.
    assert (again[1].num_cached > 0) == (pooling_type == "last")
    raw = embedded(llm, PROMPTS[:1], use_activation=False)[0]
    hidden = hidden_states(reference, PROMPTS[0])
    plain = hidden[-1] if pooling_type == "last" else hidden.mean(0)
    torch.testing.assert_close(raw, plain, atol=10 * tolerance, rtol=10 * tolerance)


def add_all(llm: LLM, prompts: list[list[int]], params: PoolingParams) -> list[str]:
    """Queue pooling requests and generating ones in turn; returns the ids of the former."""
    names = []
    for i, prompt in enumerate(prompts):
        names.append(f"pool-{i}")
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        llm.engine.add(NewRequest(names[-1], prompt, sampling, pooling=params))
        sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        llm.engine.add(NewRequest(f"text-{i}", prompt[:10], sampling))
    return names


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_pooled_rows_share_steps_with_generating_ones(
    pooling_type: Any, model: tuple[Path, torch.nn.Module]
) -> None:
    """The program gives the same bits alone, beside other requests, in chunks and operator by operator."""
    llm = llm_of(model[0])
    alone = embedded(llm_of(model[0], pooling_type=pooling_type, enforce_eager=True), PROMPTS)
    texts = [
        llm.generate([prompt[:10]], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for prompt in PROMPTS
    ]
    names = add_all(llm, PROMPTS, PoolingParams(pooling_type=pooling_type))
    vectors: dict[str, bytes] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    mixed = 0
    while llm.engine.has_work:
        outputs = llm.engine.step()
        mixed += len({output.request_id[:4] for output in outputs}) > 1
        for output in outputs:
            tokens[output.request_id] += output.tokens
            if output.pooled is not None:
                vectors[output.request_id] = output.pooled
                assert output.finish == "stop"
                assert not output.tokens
    assert mixed > 1
    got = torch.tensor([list(array("f", vectors[name])) for name in names])
    assert torch.equal(got, alone)
    for i, (result,) in enumerate(texts):
        assert tokens[f"text-{i}"] == result.outputs[0].token_ids
    stats = llm.engine.stats()
    assert stats.executors.keys() == {"program"}
    assert stats.num_generated_tokens == 2 * 20 * len(PROMPTS)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_a_preempted_request_starts_its_sum_again(
    pooling_type: Any, model: tuple[Path, torch.nn.Module]
) -> None:
    """Eleven blocks hold two of the prompts only, so some are preempted between their chunks."""
    prompts = [[i, *range(3, 70)] for i in range(4)]
    want = embedded(llm_of(model[0], pooling_type=pooling_type), prompts)
    sizes = {"num_blocks": 11, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 4}
    small = LLM(str(model[0]), pooling_type=pooling_type, **(OPTIONS | sizes | {"max_num_seqs": 4}))
    got = small.embed(prompts)
    assert sum(each.timeline.num_preemptions for each in got if each.timeline) > 0
    assert torch.equal(torch.tensor([each.outputs.embedding for each in got]), want)


def test_an_embedding_may_fill_the_context(model: tuple[Path, torch.nn.Module]) -> None:
    llm = llm_of(model[0])
    assert embedded(llm, [[7] * CONTEXT]).shape == (1, HIDDEN)
    with pytest.raises(CapacityError, match=f"{CONTEXT + 1} tokens.*holds {CONTEXT}"):
        llm.embed([[7] * (CONTEXT + 1)])
    with pytest.raises(RequestError, match="empty"):
        llm.embed([[]])
    with pytest.raises(RequestError, match="ids go from 0"):
        llm.embed([[10_000]])


def test_traces_and_costs_count_pooled_requests(model: tuple[Path, torch.nn.Module]) -> None:
    llm = llm_of(model[0])
    (result,) = llm.embed([PROMPTS[1]])
    (trace,) = result.traces
    assert trace.finish == "stop"
    assert trace.timeline.num_output == 0
    assert trace.prefill_s > 0
    assert "computing the prompt" in llm.explain(result)[0]["sentence"]
    account = llm.engine.stats().account
    assert account.prefill_s >= trace.prefill_s


def test_modules_of_sentence_transformers(tmp_path: Path) -> None:
    reference = save_model(tmp_path)
    layer = add_modules(tmp_path, "mean_tokens", dense=24, normalize=False)
    llm = llm_of(tmp_path, dtype="float32")
    assert llm.card.pooling.pooling_type == "mean"
    assert llm.card.pooling.size == 24
    assert layer is not None
    with torch.inference_mode():
        want = [torch.tanh(layer(hidden_states(reference, each).mean(0))) for each in PROMPTS]
    torch.testing.assert_close(embedded(llm, PROMPTS), torch.stack(want), atol=1e-5, rtol=1e-5)
    last = llm_of(tmp_path, dtype="float32", pooling_type="last")
    assert last.card.pooling.reason == "--pooling-type"


@pytest.mark.parametrize("pooling", ["cls_token", "max_tokens"])
def test_other_poolings_are_refused(pooling: str, tmp_path: Path) -> None:
    save_model(tmp_path)
    add_modules(tmp_path, pooling)
    with pytest.raises(UnsupportedError, match=f"{pooling} is not supported"):
        llm_of(tmp_path)
    assert llm_of(tmp_path, pooling_type="mean").card.pooling.pooling_type == "mean"


def test_bidirectional_attention_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    change_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedError, match="both directions"):
        llm_of(tmp_path)


@pytest.mark.parametrize("kind", ["Qwen3Model", "MistralModel", "LlamaModel"])
def test_a_model_without_a_head_embeds_and_does_not_generate(kind: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path, kind)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    llm = llm_of(tmp_path, dtype="float32")
    want = torch.stack([vector(reference, prompt) for prompt in PROMPTS])
    torch.testing.assert_close(embedded(llm, PROMPTS), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(RequestError, match="generates no text"):
        llm.generate(PROMPTS)
    with pytest.raises(ConfigError, match="no LM head"):
        llm_of(tmp_path, task="generate")


def test_dimensions_of_a_matryoshka_model(tmp_path: Path) -> None:
    reference = save_model(tmp_path)
    with pytest.raises(RequestError, match="is_matryoshka"):
        llm_of(tmp_path).embed(PROMPTS, dimensions=16)
    llm = llm_of(tmp_path, dtype="float32", hf_overrides={"is_matryoshka": True})
    want = torch.stack([hidden_states(reference, prompt)[-1][:16] for prompt in PROMPTS])
    want = torch.nn.functional.normalize(want, dim=1)
    torch.testing.assert_close(embedded(llm, PROMPTS, dimensions=16), want, atol=1e-5, rtol=1e-5)
    with pytest.raises(RequestError, match="1 to 64; got 65"):
        llm.embed(PROMPTS, dimensions=65)
    some = llm_of(tmp_path, hf_overrides={"matryoshka_dimensions": [8, 32]})
    assert embedded(some, PROMPTS, dimensions=32).shape == (len(PROMPTS), 32)
    with pytest.raises(RequestError, match="8, 32; got 16"):
        some.embed(PROMPTS, dimensions=16)


@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_a_classification_head_scores_pairs(kind: str, tmp_path: Path) -> None:
    reference = save_model(tmp_path, f"{kind}ForSequenceClassification", num_labels=1)
    llm = llm_of(tmp_path, dtype="float32")
    pairs = [("t9 t8", "t20 t21 t22"), ("t9 t8", "t30"), ("t9 t8", "t31 t32")]
    want = []
    for query, document in pairs:
        ids = [[int(word[1:]) for word in text.split()] for text in (query, document)]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids[0], 3, *ids[1], 2]])).logits
        want.append(torch.sigmoid(logits[0, 0]).item())
    documents = [document for _, document in pairs]
    got = [each.outputs.score for each in llm.score("t9 t8", documents)]
    assert got == pytest.approx(want, abs=1e-5)
    ranked = llm.rerank("t9 t8", documents, top_n=2)
    assert [each.index for each in ranked] == sorted(range(3), key=lambda i: -want[i])[:2]
    assert ranked[0].document == documents[ranked[0].index]
    template = tmp_path / "score.jinja"
    template.write_text("t7 {{ messages[0].content }} {{ messages[1].content }}")
    with torch.inference_mode():
        logits = reference(torch.tensor([[7, 9, 8, 30]])).logits
    (best,) = llm.rerank("t9 t8", ["t30"], template=str(template))
    assert best.relevance_score == pytest.approx(torch.sigmoid(logits[0, 0]).item(), abs=1e-5)
    template.write_text("{{ messages[1].content }}")
    with pytest.raises(ConfigError, match="lacks the query"):
        llm.score("t9", "t8", template=str(template))
    with pytest.raises(RequestError, match="no embeddings"):
        llm.embed(PROMPTS)
    with pytest.raises(ConfigError, match="classification head"):
        llm_of(tmp_path, pooling_type="mean")


def test_a_head_of_several_labels_gives_no_score(tmp_path: Path) -> None:
    save_model(tmp_path, "Qwen3ForSequenceClassification", num_labels=3)
    with pytest.raises(RequestError, match="3 labels"):
        llm_of(tmp_path).score("t4", "t5")


@pytest.mark.parametrize("tied", [False, True])
def test_two_tokens_of_the_head_score_pairs(tied: bool, tmp_path: Path) -> None:
    reference = save_model(tmp_path, tie_word_embeddings=tied)
    llm = llm_of(tmp_path, dtype="float32", hf_overrides={"classifier_from_token": ["no", "yes"]})
    with torch.inference_mode():
        logits = reference(torch.tensor([[9, 8, 3, 20, 2]])).logits[0, -1]
    want = torch.softmax(logits[[95, 96]], dim=0)[1].item()
    (got,) = llm.score("t9 t8", "t20")
    assert got.outputs.score == pytest.approx(want, abs=1e-5)
    assert llm.generate([[9, 8]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match="one token each"):
        llm_of(tmp_path, hf_overrides={"classifier_from_token": ["no no", "yes"]})


def test_without_a_head_scores_are_cosines(model: tuple[Path, torch.nn.Module]) -> None:
    llm = llm_of(model[0], dtype="float32")
    documents = ["t20 t21 t22", "t30", "t9 t8"]
    ids = [[9, 8, 2], [20, 21, 22, 2], [30, 2]]
    query, *others = (vector(model[1], each) for each in ids)
    want = [float(query @ other) for other in others] + [1.0]
    got = [each.outputs.score for each in llm.score("t9 t8", documents)]
    assert got == pytest.approx(want, abs=1e-5)
    assert next(each.index for each in llm.rerank("t9 t8", documents)) == 2
    both = [each.outputs.score for each in llm.score(["t9 t8", "t9 t8"], documents[:2])]
    assert both == pytest.approx(want[:2], abs=1e-5)
    with pytest.raises(RequestError, match="2 texts and text_2 3"):
        llm.score(["t1", "t2"], documents)
    with pytest.raises(ConfigError, match="--task score"):
        llm_of(model[0], task="score")


def test_tasks_limit_what_is_served(model: tuple[Path, torch.nn.Module]) -> None:
    with pytest.raises(RequestError, match="--task generate"):
        llm_of(model[0], task="generate").embed(PROMPTS)
    with pytest.raises(RequestError, match="generates no text"):
        llm_of(model[0], task="embed").generate(PROMPTS)


def test_a_broken_list_of_modules_is_named(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        llm_of(tmp_path)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_stages_pool_as_the_whole_network(
    executor: str, pooling_type: Any, model: tuple[Path, torch.nn.Module]
) -> None:
    options = {**OPTIONS, **EXECUTORS[executor][0], "max_num_batched_tokens": 32}
    want = embedded(llm_of(model[0], pooling_type=pooling_type, **EXECUTORS[executor][0]), PROMPTS)
    config = EngineConfig.of(model=str(model[0]), pipeline_parallel_size=2, **options)
    with staged(config, 2) as (built, _):
        llm = LLM.over(open_model(config).card, built)
        names = add_all(llm, PROMPTS, PoolingParams(pooling_type=pooling_type))
        vectors: dict[str, bytes] = {}
        while built.engine.has_work:
            for output in built.engine.step():
                if output.pooled is not None:
                    vectors[output.request_id] = output.pooled
        got = torch.tensor([list(array("f", vectors[name])) for name in names])
        assert built.engine.stats().executors.keys() == {executor}
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_ranks_pool_as_one_process(pooling_type: str, model: tuple[Path, torch.nn.Module]) -> None:
    want = torch.stack([vector(model[1], prompt, pooling_type) for prompt in PROMPTS])
    options = {"tensor_parallel_size": 2, "dtype": "float32", "pooling_type": pooling_type}
    got = embedded(llm_of(model[0], **options), PROMPTS)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_adapters_change_embeddings(executor: str, pooling_type: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    write_adapter(tmp_path / "a")
    options = {**OPTIONS, "max_num_batched_tokens": 32, **EXECUTORS[executor][0]}
    llm = LLM(
        str(folder),
        load_format="dummy",
        pooling_type=pooling_type,
        enable_lora=True,
        lora_modules=(f"a={tmp_path / 'a'}",),
        **options,
    )
    plain, adapted = embedded(llm, PROMPTS), embedded(llm, PROMPTS, adapter="a")
    assert (plain - adapted).abs().amax(1).min() > 0.01
    # One by one, and with the other's blocks in the prefix cache.
    for i, prompt in enumerate(PROMPTS):
        for want, name in ((adapted[i], "a"), (plain[i], "")):
            got = embedded(llm, [prompt], adapter=name)[0]
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert llm.engine.stats().executors.keys() == {executor}


def test_speculation_does_not_change_embeddings(model: tuple[Path, torch.nn.Module]) -> None:
    want = embedded(llm_of(model[0]), PROMPTS)
    llm = llm_of(model[0], spec="ngram")
    assert torch.equal(embedded(llm, PROMPTS), want)


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_networks_of_transformers_pool_too(
    pooling_type: str, model: tuple[Path, torch.nn.Module]
) -> None:
    llm = llm_of(model[0], model_impl="transformers", dtype="float32", pooling_type=pooling_type)
    want = torch.stack([vector(model[1], prompt, pooling_type) for prompt in PROMPTS])
    torch.testing.assert_close(embedded(llm, PROMPTS), want, atol=1e-5, rtol=1e-5)
