"""Named workloads: lengths, reproducibility, new token ids for each draw."""

from __future__ import annotations

import pytest

from windlass.errors import ConfigError
from windlass.tools.common.workload import Shape, Sizes, find, find_all


@pytest.mark.parametrize(
    ("name", "count", "shape", "shared"),
    [
        ("decode_b64", 64, Shape(128, 256), 0),
        ("prefill", 32, Shape(2048, 1), 0),
        ("prefix", 256, Shape(64, 64), 1024),
        ("io1000x500x16", 16, Shape(1000, 500), 0),
        ("shared", 32, Shape(32, 16), 1000),
    ],
)
def test_even_workloads(name: str, count: int, shape: Shape, shared: int) -> None:
    workload = find(name)
    assert workload.name == name
    assert workload.shapes == (shape,) * count
    assert workload.num_shared == shared


def test_mixed_covers_its_ranges() -> None:
    shapes = find("mixed").shapes
    assert len(shapes) == 512
    assert all(64 <= shape.num_prompt <= 1024 for shape in shapes)
    assert all(64 <= shape.num_output <= 512 for shape in shapes)
    assert find("mixed") == find("mixed")


def test_nano_has_the_published_lengths() -> None:
    workload = find("nano")
    assert sum(shape.num_output for shape in workload.shapes) == 133_966  # as published
    assert workload.requests(1000)[0].temperature == 0.6


def test_another_draw_has_other_ids_of_the_same_lengths() -> None:
    workload = find("shared", Sizes(num_requests=3))
    first, again, other = (workload.requests(5000, draw) for draw in (1, 1, 2))
    assert first == again
    assert [len(request.prompt) for request in first] == [len(request.prompt) for request in other]
    assert first[0].prompt[:16] == first[2].prompt[:16]
    assert first[0].prompt[:16] != other[0].prompt[:16]
    assert all(0 <= token < 5000 for request in first for token in request.prompt)


def test_changed_sizes_are_in_the_name() -> None:
    assert find("decode", Sizes(batch=4)) == find("decode_b4")
    assert find("io", Sizes(input_len=3, output_len=4, num_requests=5)) == find("io3x4x5")
    assert find("decode_b4", Sizes(input_len=3)).name == "decode_b4[input_len=3]"
    assert find("ragged", Sizes(num_requests=3)).name == "ragged[num_requests=3]"


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        ("decodes", {}, "workload 'decodes' is not known. Known: decode, prefill"),
        (",", {}, "--workload is empty"),
        ("mixed", {"input_len": 4}, "--input-len has no effect with --workload mixed"),
        ("decode_b8", {"batch": 4}, "--batch has no effect"),
        ("decode", {"batch": 0}, "--batch must be at least 1, got 0"),
    ],
)
def test_unused_sizes_are_rejected(names: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_all(names, Sizes(**sizes))


def test_one_of_several_workloads_must_use_a_size() -> None:
    found = find_all("decode_b2, mixed", Sizes(input_len=4))
    assert [workload.name for workload in found] == ["decode_b2[input_len=4]", "mixed"]
