"""Gathering and scattering KV blocks in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import Check
from tests.kernels.test_interpreted import INTERPRETED, inside
from windlass.kernels import reference

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter's process")
def test_kernels_in_the_interpreter(interpreted: Check) -> None:
    interpreted(__file__)


@inside
@pytest.mark.parametrize("word", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("planes", "words", "blocks"), [(1, 1, [4]), (3, 1025, [6, 0, 2]), (2, 7, list(range(8)))]
)
def test_blocks(planes: int, words: int, blocks: list[int], word: torch.dtype) -> None:
    from windlass.kernels.triton.block_copy import gather_blocks, scatter_blocks

    pages = torch.randint(0, 100, (planes, 8, words), dtype=word)
    ids = torch.tensor(blocks)
    # A section in the middle of longer records.
    records = torch.zeros(len(blocks), 5 + planes * words + 3, dtype=word)
    expected = records.clone()
    reference.gather_blocks(pages, ids, section(expected, planes, words))
    gather_blocks(pages, ids, section(records, planes, words))
    assert torch.equal(records, expected)
    assert torch.equal(section(records, planes, words)[0], pages[:, blocks[0]])

    others = torch.randint(0, 100, records.shape, dtype=word)
    wanted = pages.clone()
    reference.scatter_blocks(wanted, ids, section(others, planes, words))
    scatter_blocks(pages, ids, section(others, planes, words))
    assert torch.equal(pages, wanted)
    assert torch.equal(pages[:, blocks[0]], section(others, planes, words)[0])


def section(records: torch.Tensor, planes: int, words: int) -> torch.Tensor:
    return records[:, 5 : 5 + planes * words].unflatten(1, (planes, words))
