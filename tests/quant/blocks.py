"""Random blocks of every storage type of GGUF, with weights of the size that models have."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from random_blocks import random_blocks


def weights_of(name: str, rows: int, columns: int, seed: int = 3) -> np.ndarray:
    return random_blocks(GGMLQuantizationType[name], rows, columns, spread=0.05, seed=seed)
