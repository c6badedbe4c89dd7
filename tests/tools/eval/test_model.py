"""Figures of the default model compared with transformers."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from windlass.build import open_model
from windlass.config import EngineConfig
from windlass.folders import cache_dir
from windlass.tools.eval.data import read_corpus
from windlass.tools.eval.run import measure
from windlass.tools.eval.windows import Cut, cut_corpus

pytestmark = pytest.mark.model

TEXT = """A windlass is an apparatus for moving heavy weights. Typically, it consists of a horizontal
barrel, which is rotated by the turn of a crank or belt. A rope is wound around the barrel, and a
weight is fastened to its end. Sailors raise the anchor with one, and wells have had them since the
Middle Ages. It gives the arm a lever: what is gained in force is paid for in turns of the crank.
"""
WIKITEXT = cache_dir() / "data" / "wikitext2"


def test_perplexity_matches_transformers(
    default_reference: torch.nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    corpus, cut = read_corpus(str(path)), Cut(context=64, stride=24)
    exact = {"model": "default", "dtype": "float32"}
    config = EngineConfig.of(**exact, max_num_batched_tokens=40)
    # Only the KV blocks differ, so the weights are shared.
    other = EngineConfig.of(**exact, block_size=32)
    outcome = measure(config, other, corpus, cut)
    total, count = 0.0, 0
    for item in cut_corpus(corpus, open_model(config).card, cut):
        tokens = torch.tensor(item.window.tokens)
        with torch.inference_mode():
            scores = default_reference(tokens[None]).logits[0].log_softmax(-1)
        first = item.window.first
        total -= scores[first:-1].gather(-1, tokens[first + 1 :, None]).sum().item()
        count += len(item.window.tokens) - 1 - first
    assert outcome.overall.tokens == count
    assert outcome.overall.perplexity == pytest.approx(math.exp(total / count), rel=1e-3)
    against = outcome.overall.against
    assert against is not None
    assert against.agreement == 1
    assert against.kl_max < 1e-4
    assert against.ppl_ratio == pytest.approx(1, abs=1e-4)


@pytest.mark.skipif(
    not WIKITEXT.is_dir() or importlib.util.find_spec("pyarrow") is None,
    reason="WikiText-2's test split is not in the user's cache, or pyarrow is missing",
)
def test_wikitext_with_llama_cpp_definition() -> None:
    corpus = read_corpus("wikitext2")
    assert corpus.documents[0].text is not None
    assert corpus.documents[0].text.startswith(" \n = Robert Boulter = \n \n Robert Boulter")
    cut = Cut("llama.cpp", context=256, max_windows=2)
    outcome = measure(EngineConfig.of(model="default"), None, corpus, cut)
    assert 5 < outcome.overall.perplexity < 60
    assert outcome.overall.tokens == 2 * 127
