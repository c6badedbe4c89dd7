"""Compiles a case of a Triton kernel for a GPU that need not be there, and keeps the results.

Results are kept in pytest's cache under Triton's own key: the source with all that it calls, signature,
constants, options, target and version of ptxas. An unchanged case is not compiled again.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.cache import get_cache_key

from windlass.kernels.gpu import Gpu

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_ALIGNED = (
    *("N", "K", "K_PAD", "N0", "N1", "N2", "span"),
    *("table_stride", "stride", "width", "size", "words"),
    *("q_stride", "latent_stride", "rotated_token", "rotated_head"),
    *("q_token", "q_head", "rope_token", "rope_head", "key_head", "value_head"),
    *("x_row", "x_head", "w_head", "w_in", "w_out", "out_row", "out_head"),
)

Case = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a program of the compiled kernel needs."""

    shared: int  # bytes
    stack: int  # bytes of spilled registers
    stages: int | None = None  # None: those of the case


def needs_fp8(case: Case) -> bool:
    return any("fp8" in kind for kind in case[1].values())


def is_gluon(case: Case) -> bool:
    return isinstance(case[0], GluonJITFunction)


def compiled(case: Case, gpu: Gpu, folder: Path) -> Compiled:
    """Compile with the stages of the case, or as many as fit the GPU, as kernels/triton/fit.py does."""
    found = _compile(case, gpu, folder)
    stages = case[3].get("num_stages")
    while found.shared > gpu.shared_bytes and stages is not None and stages > 1:
        stages -= 1
        found = _compile(case, gpu, folder, stages)
    return found


def _compile(case: Case, gpu: Gpu, folder: Path, stages: int | None = None) -> Compiled:
    function, signature, constants, options = case
    names = function.arg_names
    full = {key: signature.get(key, "constexpr") for key in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, key in enumerate(names)
        if full[key].startswith("*") or (key in _ALIGNED and full[key] != "constexpr")
    }
    # A pointer that is not in the signature is None.
    absent = {key: None for key, kind in full.items() if kind == "constexpr"}
    constants, options = {**absent, **constants}, dict(options)
    if "PDL" in names:
        constants["PDL"] = gpu.lacks_pdl() is None
        options["launch_pdl"] = constants["PDL"]
    if stages is not None:
        options["num_stages"] = stages
        constants |= {"STAGES": stages} if "STAGES" in constants else {}
    values = {(names.index(key),): value for key, value in constants.items()}
    make = GluonASTSource if is_gluon(case) else ASTSource
    source = make(function, full, constexprs=values, attrs=aligned)
    major, minor = gpu.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    kept = folder / f"{_key(source, target, options)}.json"
    if kept.is_file():
        return Compiled(**json.loads(kept.read_text()))
    kernel = triton.compile(source, target=target, options=options)
    result = Compiled(kernel.metadata.shared, _stack(kernel.asm["cubin"]), stages)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(asdict(result), file)
    Path(file.name).replace(kept)
    return result


def _key(source: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    return sha256(key.encode()).hexdigest()


def _stack(binary: bytes) -> int:
    """Bytes of stack of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    return int(found.group(2))
