"""llama.cpp itself, through a shared library that holds it: its quantisers, and its perplexity.

For comparisons only. Any library that exports llama.h's functions will do, such as the extension
module of the package xllamacpp. Parameters are passed as opaque memory that the library
fills with its defaults, so that their layout need not be known; only the first four fields of
the context's (n_ctx, n_batch, n_ubatch, n_seq_max) are set.
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

# What llama.cpp takes instead where blocks of 256 do not divide a row.
_INSTEAD = {
    Kind.Q2_K: Kind.IQ4_NL,
    Kind.Q3_K: Kind.IQ4_NL,
    Kind.Q4_K: Kind.Q5_0,
    Kind.Q5_K: Kind.Q5_1,
    Kind.Q6_K: Kind.Q8_0,
}
_WRITTEN_ANEW = ("general.architecture", "general.file_type")
_NEEDED = ("ggml_quantize_chunk", "llama_decode", "llama_tokenize", "llama_memory_clear")


class _Opaque(ctypes.Structure):
    """More than any version's parameters take."""

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
    """The library's functions, declared."""

    def __init__(self, path: Path) -> None:
        try:
            self._lib = ctypes.CDLL(str(path.resolve()))
        except OSError as error:
            raise ConfigError(f"{path}: is no library that can be loaded: {error}.") from error
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
        """Rows of float32 as the type's blocks, [rows, bytes]."""
        rows, columns = values.shape
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.empty((rows, columns // block * size), np.uint8)
        wide = np.ascontiguousarray(values, np.float32)
        made = self._lib.ggml_quantize_chunk(
            int(kind), wide.ctypes.data, blocks.ctypes.data, 0, rows, columns, None
        )
        if made != blocks.nbytes:
            raise EngineError(f"llama.cpp made {made} bytes of {kind.name}, not {blocks.nbytes}.")
        return blocks

    def perplexity(self, model: Path, text: str, context: int, windows: int, threads: int) -> float:
        """As its own tool counts: windows side by side, the second half of each is scored."""
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
        parts = tokens.reshape(windows, context)
        losses = [self._losses(running, part, size) for part in parts]
        lib.llama_free(running)
        lib.llama_model_free(loaded)
        return float(np.exp(np.concatenate(losses).mean()))

    # ---- what an engine needs ------------------------------------------------------------------

    def load(self, path: Path) -> int:
        loaded: int | None = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        if not loaded:
            raise EngineError(f"{path}: llama.cpp does not load it.")
        return loaded

    def vocab_size(self, model: int) -> int:
        size: int = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(model))
        return size

    def context(self, model: int, rows: int, longest: int, step_tokens: int, threads: int) -> int:
        """Room for so many sequences side by side."""
        params = self._lib.llama_context_default_params()
        each = -(-longest // 256) * 256  # it rounds itself otherwise
        wanted: list[ctypes.c_uint32 | int] = [
            rows * each,
            max(step_tokens, rows),
            max(step_tokens, rows),
            rows,
        ]
        (ctypes.c_uint32 * 4).from_buffer(params)[:] = wanted
        made: int | None = self._lib.llama_init_from_model(model, params)
        if not made:
            raise EngineError(f"llama.cpp has no context for {rows} rows of {longest} tokens.")
        self._lib.llama_set_n_threads(made, threads, threads)
        return made

    def batch(self, tokens: int) -> _Batch:
        made: _Batch = self._lib.llama_batch_init(tokens, 0, 1)
        return made

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
            raise EngineError(f"llama.cpp does not compute a window: it returned {failed}.")
        shape = (count - half, vocab_size)
        logits = np.ctypeslib.as_array(lib.llama_get_logits(running), shape)[:-1].astype(np.float64)
        most = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - most).sum(axis=1)) + most[:, 0]
        picked: NDArray[Any] = logits[np.arange(count - half - 1), tokens[half + 1 :]]
        return sums - picked


def requantize(source: Path, target: Path, kind: Kind, library: LlamaCpp) -> dict[str, int]:
    """Write a GGUF with its matrices in another type; returns how many are in which.

    The embedding gets at least 6 bits, as in llama.cpp's own files, and rows that blocks of 256 do
    not divide the type that llama.cpp falls back to.
    """
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _WRITTEN_ANEW:
            continue
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of)
    used: dict[str, int] = {}
    for tensor in reader.tensors:
        if len(tensor.shape) != 2:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        wanted = type_of(tensor.name, values.shape[1], kind)
        writer.add_tensor(tensor.name, library.quantize(values, wanted), raw_dtype=wanted)
        used[wanted.name] = used.get(wanted.name, 0) + 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return used


def type_of(name: str, num_in: int, kind: Kind) -> Kind:
    """The type that a matrix of so many inputs gets in a file of this kind."""
    wanted = Kind.Q6_K if name.startswith("token_embd") and kind != Kind.Q8_0 else kind
    return _INSTEAD[wanted] if num_in % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def find_library() -> Path:
    """The library of an installed llama-cpp-python or xllamacpp."""
    for package, pattern in (("llama_cpp", "lib/libllama.so*"), ("xllamacpp", "*.so")):
        found = find_spec(package)
        if found is not None and found.origin is not None:
            for path in sorted(Path(found.origin).parent.glob(pattern)):
                return path
    raise ConfigError(
        "no llama.cpp library is installed: pip install llama-cpp-python or xllamacpp, or name a "
        "library with --llama-cpp FILE."
    )


def _exports(library: ctypes.CDLL, name: str) -> bool:
    try:
        getattr(library, name)
    except AttributeError:
        return False
    return True
