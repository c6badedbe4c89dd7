"""Structured outputs on a GPU: in a batch with other requests, with and without speculation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import CONFIG
from tests.runner.test_grammar import EOS, FORMS
from windlass import LLM, SamplingParams

pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": EOS}))
    return path


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"spec": "ngram"}, {"overlap": False}]
)
def test_structured_outputs_beside_free_requests(folder: Path, options: dict[str, Any]) -> None:
    llm = LLM(str(folder), load_format="dummy", num_blocks=400, max_num_seqs=16, **options)
    free = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    structured = [
        SamplingParams(structured_outputs=form, max_tokens=150, seed=1)
        for form, _ in FORMS.values()
    ]
    results = llm.generate([[5, 6]] * (1 + len(structured)), [free, *structured])
    assert len(results[0].outputs[0].token_ids) == 30
    for result, (_, expected) in zip(results[1:], FORMS.values(), strict=True):
        output = result.outputs[0]
        assert (bool(re.fullmatch(expected, output.text)), output.finish_reason) == (True, "stop")
