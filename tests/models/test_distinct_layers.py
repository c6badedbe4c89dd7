"""Steps that only compile kernels run one layer of each kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.comparison import logits_of, make_parts, save_tiny
from windlass.config import ModelConfig
from windlass.kernels.compile_only import compile_only
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.checkpoint import Checkpoint
from windlass.models.decoder import DecoderModel
from windlass.models.hparams import HParams
from windlass.models.loader import load
from windlass.models.network import make_network
from windlass.models.source import resolve
from windlass.models.stages import Stage

FULL, WINDOW = "full_attention", "sliding_attention"
CASES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "one kind": ("Llama", {"num_hidden_layers": 5}, [0, 4]),
    "one layer": ("Llama", {"num_hidden_layers": 1}, [0]),
    "windows": (
        "Ministral",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": [WINDOW, WINDOW, FULL, WINDOW, WINDOW],
        },
        [0, 2, 4],
    ),
    "experts in some layers": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [2],
        },
        [0, 2, 4],
    ),
}


def distinct(hparams: HParams, checkpoint: Checkpoint, start: int) -> list[int]:
    """The layers of the stage that begins there."""
    stage = Stage(start, hparams.num_layers, hparams.num_layers)
    network = make_network(hparams, replace(make_parts(hparams), stage=stage))
    load(network, checkpoint, torch.device("cpu"))
    (model,) = (each for each in network.modules() if isinstance(each, DecoderModel))
    return model._distinct_layers


@pytest.mark.parametrize("name", CASES)
def test_layers(name: str, tmp_path: Path) -> None:
    family, changes, layers = CASES[name]
    save_tiny(family, changes, tmp_path)
    config = ModelConfig(model=str(tmp_path))
    files = resolve(config)
    hparams, checkpoint = load_hparams(files, config), open_checkpoint(files, config)
    assert distinct(hparams, checkpoint, 0) == layers
    if hparams.num_layers == 5:
        assert distinct(hparams, checkpoint, 4) == [4]
    ids = list(range(5, 17))
    whole = logits_of(hparams, checkpoint, ids, chunks=[12])
    with compile_only():
        some = logits_of(hparams, checkpoint, ids, chunks=[12])
    assert some.shape == whole.shape
    assert torch.equal(some, whole) == (len(layers) == hparams.num_layers)
