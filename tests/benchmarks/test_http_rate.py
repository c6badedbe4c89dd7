"""How http_rate.py divides its load."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"


@pytest.mark.parametrize(
    ("num_clients", "num_requests"), [(256, 1024), (256, 256), (1000, 3000), (3, 12), (5, 13)]
)
def test_all_clients_have_equally_many_requests(
    num_clients: int, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from http_rate import split_load

    args = Namespace(client_processes=6, input_len=8, output_len=4)
    loads = split_load(args, 1, num_clients, num_requests)
    assert sum(load.num_clients for load in loads) == num_clients
    assert sum(load.num_requests for load in loads) == num_requests
    assert [load.first_client for load in loads[1:]] == [
        load.first_client + load.num_clients for load in loads[:-1]
    ]
    for load in loads:
        assert abs(load.num_requests - num_requests / num_clients * load.num_clients) <= 1
