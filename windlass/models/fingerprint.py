"""A fingerprint of a model, by which a draft head recognises its target model.

It is a hash of the shape and of a few values of the embedding and the last norm, not of file names.
The model keeps it on a CPU, on a GPU and with quantised layers, as long as these values stay the
same in bfloat16. Full weights are not read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from windlass.models.checkpoint import Checkpoint
from windlass.models.hparams import HParams

if TYPE_CHECKING:
    import torch

_ROWS = 8  # of the embedding, evenly spaced over the vocabulary


def fingerprint(hparams: HParams, checkpoint: Checkpoint) -> str:
    """Hash a model to 32 hexadecimal digits. Reads headers and a few KiB of tensors."""
    shape = (hparams.architecture, hparams.hidden_size, hparams.num_layers, hparams.vocab_size)
    digest = hashlib.blake2b(repr(shape).encode(), digest_size=16)
    table = (hparams.vocab_size, hparams.hidden_size)
    for i in range(min(_ROWS, hparams.vocab_size)):
        index = i * hparams.vocab_size // _ROWS
        row = checkpoint.read("model.embed_tokens.weight", table, (slice(index, index + 1),))
        digest.update(_bytes(row))
    digest.update(_bytes(checkpoint.read("model.norm.weight", (hparams.hidden_size,))))
    return digest.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    """Bytes as bfloat16, which are equal for float32, float16 and bfloat16 copies of the values."""
    import torch

    return values.float().cpu().bfloat16().view(torch.int16).numpy().tobytes()
