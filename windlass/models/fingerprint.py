"""Which model a draft head was trained for: a short text that is the same wherever the model lies.

Made of the shape and of a few numbers of the embedding and the last norm, not of file names: the
same model on a CPU, on a GPU, or with its layers quantised keeps it, as long as these numbers stay
the same in bfloat16. Whole weights are not read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams

if TYPE_CHECKING:
    import torch

_ROWS = 8  # of the embedding, spread over the vocabulary


def fingerprint(hparams: HParams, checkpoint: Checkpoint) -> str:
    """32 hexadecimal digits; reads headers and a few KiB."""
    shape = (hparams.architecture, hparams.hidden_size, hparams.num_layers, hparams.vocab_size)
    digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
    table = (hparams.vocab_size, hparams.hidden_size)
    for i in range(min(_ROWS, hparams.vocab_size)):
        at = i * hparams.vocab_size // _ROWS
        row = checkpoint.read("model.embed_tokens.weight", table, slice(at, at + 1))
        digest.update(_bytes(row))
    digest.update(_bytes(checkpoint.read("model.norm.weight", (hparams.hidden_size,))))
    return digest.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    """As bfloat16: what float32, float16 and bfloat16 copies of the same numbers have in common."""
    import torch

    return values.float().cpu().bfloat16().view(torch.int16).numpy().tobytes()
