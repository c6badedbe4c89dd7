"""The native operations, and the self-test programs.

The programs of all selected tests run side by side, since each keeps one core busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kernels.native.backends import SelfTest
from windlass.kernels.native.ops import NativeOps
from windlass.kernels.native.pool import Workers


@pytest.fixture(scope="session")
def ops() -> NativeOps:
    return NativeOps(Workers(2).pool)


@pytest.fixture(scope="session")
def run_selftest(request: pytest.FixtureRequest) -> Iterator[Callable[[SelfTest], str]]:
    """Build and run the self-tests of the session in two threads; return the output of one."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected = [item for item in items if "run_selftest" in item.fixturenames]
    runnable = [
        item for item in selected if not any(m.args[0] for m in item.iter_markers("skipif"))
    ]
    selftests = dict.fromkeys(item.callspec.params["selftest"] for item in runnable)
    with ThreadPoolExecutor(2) as threads:
        outputs = {one: threads.submit(one.run, request.config) for one in selftests}
        yield lambda one: outputs[one].result()
        for output in outputs.values():
            output.cancel()
