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
    name = f"{hparams.table}.weight"
    table: tuple[int, ...] = (hparams.vocab_size, hparams.hidden_size)
    if name in checkpoint.names():
        table = checkpoint.stored(name).shape
    for i in range(min(_ROWS, table[0])):
        index = i * table[0] // _ROWS
        row = checkpoint.read(name, table, (slice(index, index + 1),))
        digest.update(_bytes(row))
    if hparams.transformers is None:
        digest.update(_bytes(checkpoint.read("model.norm.weight", (hparams.hidden_size,))))
    return digest.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    """Bytes as bfloat16, which are equal for float32, float16 and bfloat16 copies of the values."""
    import torch

    return values.float().cpu().bfloat16().view(torch.int16).numpy().tobytes()
