"""Calls llama.cpp through a shared library: its quantisers, its perplexity, and decoding.

For comparisons only. Any library that exports llama.h's functions works, such as the extension
module of the package xllamacpp. Parameters are passed as opaque memory that the library fills with
its defaults, so their layout need not be known. Only the first four fields of the context's
parameters (n_ctx, n_batch, n_ubatch, n_seq_max) are set.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from windlass.errors import ConfigError, EngineError

Kind = GGMLQuantizationType

# llama.cpp's fallback types for rows that blocks of 256 do not divide.
_FALLBACK = {
    Kind.Q2_K: Kind.IQ4_NL,
    Kind.Q3_K: Kind.IQ4_NL,
    Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}
_NOT_COPIED = ("general.architecture", "general.file_type")
_NEEDED = ("ggml_quantize_chunk", "llama_decode", "llama_tokenize", "llama_memory_clear")


class _Opaque(ctypes.Structure):
    """Memory that is larger than the parameters of any version."""

    _fields_ = (("memory", ctypes.c_uint8 * 1024),)


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class LlamaCpp:
    """The library's functions with their signatures."""

    def __init__(self, path: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path.resolve()))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be loaded as a library: {error}.") from error
        missing = [name for name in _NEEDED if not _exports(self._lib, name)]
        if missing:
            raise ConfigError(f"{path}: does not export {', '.join(missing)} of llama.cpp.")
        void, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._declare("ggml_quantize_chunk", ctypes.c_size_t, i32, void, void, i64, i64, i64, void)
        self._declare("llama_model_default_params", _Opaque)
        self._declare("llama_context_default_params", _Opaque)
        self._declare("llama_model_load_from_file", void, ctypes.c_char_p, _Opaque)
        self._declare("llama_init_from_model", void, void, _Opaque)
        self._declare("llama_set_n_threads", None, void, i32, i32)
        self._declare("llama_model_get_vocab", void, void)
        self._declare("llama_vocab_n_tokens", i32, void)
        flags = (ctypes.c_bool, ctypes.c_bool)
        self._declare("llama_tokenize", i32, void, ctypes.c_char_p, i32, void, i32, *flags)
        self._declare("llama_batch_init", _Batch, i32, i32, i32)
        self._declare("llama_batch_free", None, _Batch)
        self._declare("llama_decode", i32, void, _Batch)
        self._declare("llama_get_logits", ctypes.POINTER(ctypes.c_float), void)
        self._declare("llama_get_memory", void, void)
        self._declare("llama_memory_clear", None, void, ctypes.c_bool)
        self._declare("llama_free", None, void)
        self._declare("llama_model_free", None, void)
        self._lib.llama_backend_init()

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._lib, name)
        function.restype, function.argtypes = result, list(arguments)

    def quantize(self, values: NDArray[Any], kind: Kind) -> NDArray[Any]:
        """Quantise rows of float32 to the type's blocks, [rows, bytes]."""
        rows, columns = values.shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.empty((rows, columns // block * size), np.uint8)
        source = np.ascontiguousarray(values, np.float32)
        written = self._lib.ggml_quantize_chunk(
            int(kind), source.ctypes.data, blocks.ctypes.data, 0, rows, columns, None
        )
        if written != blocks.nbytes:
            raise EngineError(
                f"llama.cpp wrote {written} bytes of {kind.name}, expected {blocks.nbytes}."
            )
        return blocks

    def perplexity(
        self, model: Path, text: str, *, context: int, windows: int, threads: int
    ) -> float:
        """Perplexity as llama-perplexity computes it: the second half of each window is scored."""
        lib = self._lib
        loaded = self.load(model)
        params = lib.llama_context_default_params()
        (ctypes.c_uint32 * 3).from_buffer(params)[:] = [context] * 3
        running = lib.llama_init_from_model(loaded, params)
        lib.llama_set_n_threads(running, threads, threads)
        vocab = lib.llama_model_get_vocab(loaded)
        tokens = self._tokens(vocab, text)[: context * windows]
        if len(tokens) < context * windows:
            raise ConfigError(f"the text has {len(tokens)} tokens, less than {context * windows}.")
        size = lib.llama_vocab_n_tokens(vocab)
        losses = [
            self._losses(running, window, size) for window in tokens.reshape(windows, context)
        ]
        lib.llama_free(running)
        lib.llama_model_free(loaded)
        return float(np.exp(np.concatenate(losses).mean()))

    # ---- decoding ------------------------------------------------------------------------------

    def load(self, path: Path) -> int:
        loaded: int | None = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not loaded:
            raise EngineError(f"{path}: llama.cpp cannot load it.")
        return loaded

    def vocab_size(self, model: int) -> int:
        size: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(model))
        return size

    def context(
        self, model: int, *, rows: int, max_len: int, step_tokens: int, threads: int
    ) -> int:
        """Create a context for `rows` sequences."""
        params = self._lib.llama_context_default_params()
        row_tokens = -(-max_len // 256) * 256  # llama.cpp would round it up itself
        values: list[ctypes.c_uint32 | int] = [
            rows * row_tokens,
            max(step_tokens, rows),
            max(step_tokens, rows),
            rows,
        ]
        (ctypes.c_uint32 * 4).from_buffer(params)[:] = values
        context: int | None = self._lib.llama_init_from_model(model, params)
        if not context:
            raise EngineError(
                f"llama.cpp cannot create a context for {rows} rows of {max_len} tokens."
            )
        self._lib.llama_set_n_threads(context, threads, threads)
        return context

    def batch(self, tokens: int) -> _Batch:
        batch: _Batch = self._lib.llama_batch_init(tokens, 0, 1)
        return batch

    def decode(self, context: int, batch: _Batch) -> int:
        failed: int = self._lib.llama_decode(context, batch)
        return failed

    def logits(self, context: int, rows: int, vocab_size: int) -> NDArray[Any]:
        return np.ctypeslib.as_array(self._lib.llama_get_logits(context), (rows, vocab_size))

    def free(self, context: int, batch: _Batch) -> None:
        self._lib.llama_batch_free(batch)
        self._lib.llama_free(context)

    def _tokens(self, vocab: int, text: str) -> NDArray[Any]:
        raw = text.encode()
        ids = np.empty(len(raw) + 8, np.int32)
        count = self._lib.llama_tokenize(
            vocab, raw, len(raw), ids.ctypes.data, len(ids), True, False
        )
        return ids[:count]

    def _losses(self, running: int, tokens: NDArray[Any], vocab_size: int) -> NDArray[Any]:
        """Negative log probabilities of the second half of a window."""
        lib, count = self._lib, len(tokens)
        half = count // 2
        lib.llama_memory_clear(lib.llama_get_memory(running), True)
        batch = lib.llama_batch_init(count, 0, 1)
        batch.num_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= half
        failed = lib.llama_decode(running, batch)
        lib.llama_batch_free(batch)
        if failed:
            raise EngineError(f"llama_decode failed for a window: it returned {failed}.")
        shape = (count - half, vocab_size)
        logits = np.ctypeslib.as_array(lib.llama_get_logits(running), shape)[:-1].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        targets: NDArray[Any] = logits[np.arange(count - half - 1), tokens[half + 1 :]]
        return log_sums - targets


def requantize(source: Path, target: Path, kind: Kind, library: LlamaCpp) -> dict[str, int]:
    """Write a GGUF file with its matrices in another type; returns the count of each type.

    The embedding gets at least 6 bits, as in llama.cpp's own files. Rows that blocks of 256 do not
    divide get llama.cpp's fallback type.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _NOT_COPIED:
            continue
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of)
    used: dict[str, int] = {}
    for tensor in reader.tensors:
        if len(tensor.shape) != 2:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        own = type_of(tensor.name, values.shape[1], kind)
        writer.add_tensor(tensor.name, library.quantize(values, own), raw_dtype=own)
        used[own.name] = used.get(own.name, 0) + 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return used


def type_of(name: str, num_in: int, kind: Kind) -> Kind:
    """The type of a matrix with `num_in` inputs in a file of this kind."""
    own = Kind.Q6_K if name.startswith("token_embd") and kind != Kind.Q8_0 else kind
    return _FALLBACK[own] if num_in % gguf.GGML_QUANT_SIZES[own][0] else own


def find_library() -> Path:
    """The library of an installed llama-cpp-python or xllamacpp."""
    for package, pattern in (("llama_cpp", "lib/libllama.so*"), ("xllamacpp", "*.so")):
        found = find_spec(package)
        if found is not None and found.origin is not None:
            for path in sorted(Path(found.origin).parent.glob(pattern)):
                return path
    raise ConfigError(
        "no llama.cpp library is installed: pip install llama-cpp-python or xllamacpp, or set a "
        "library with --llama-cpp FILE."
    )


def _exports(library: ctypes.CDLL, name: str) -> bool:
    try:
        getattr(library, name)
    except AttributeError:
        return False
    return True
