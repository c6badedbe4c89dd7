"""Launches a kernel with as many pipeline stages as the shared memory of the GPU allows.

Tilings were measured on GPUs with 227 KiB of shared memory per program; others have 163 or 99 KiB. Each
stage holds one more tile in flight, so fewer stages are slower, and results stay the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from triton.runtime.errors import OutOfResources

from windlass.errors import ConfigError
from windlass.kernels.compile_only import is_compiling


class Fitted:
    """A kernel whose `num_stages` is lowered until the compiled kernel fits."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._fewer: dict[tuple[Any, ...], int] = {}  # stages of constants that did not fit

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, num_stages: int, **options: Any) -> Any:
        if is_compiling():
            return self._kernel.warmup(*args, grid=grid, **_with(num_stages, options))
        key = (num_stages, *options.values()) if self._fewer else ()
        stages = self._fewer.get(key, num_stages)
        while True:
            try:
                return self._kernel[grid](*args, **_with(stages, options))
            except OutOfResources as error:
                if error.name != "shared memory":
                    raise
                if stages == 1:
                    raise ConfigError(_does_not_fit(self._kernel, error)) from error
            stages -= 1
            self._fewer[num_stages, *options.values()] = stages


def _with(stages: int, options: dict[str, Any]) -> dict[str, Any]:
    """The launch options; some kernels also have the stages of their loop as a constant."""
    in_loop = {"STAGES": stages} if "STAGES" in options else {}
    return {**options, **in_loop, "num_stages": stages}


def _does_not_fit(kernel: Any, error: OutOfResources) -> str:
    return (
        f"{kernel.__name__} needs {error.required} bytes of shared memory per program, and this GPU "
        f"has {error.limit}. Use --plain-kernels."
    )


@cache
def fit(kernel: Any) -> Fitted:
    """The kernel, launched with stages that fit."""
    return Fitted(kernel)
