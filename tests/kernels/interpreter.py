"""Makes Triton's interpreter faster, in the process that runs it: the same operations, with less around them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def speed_up() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter replaces all functions of `triton.language` by its own at every call inside a kernel,
    # `tl.sum` too, and takes it back after the kernel. Nothing else uses them in its process.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda _function: nothing

    # It computes each sum and product of integers again in 64 bits, for an assertion that `debug` enables.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)

    dtype_of, found = interpreter._get_np_dtype, {}  # it makes a table of all types at every call

    def kept_dtype(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = dtype_of(kind)
        return found[kind.name]

    interpreter._get_np_dtype = kept_dtype
