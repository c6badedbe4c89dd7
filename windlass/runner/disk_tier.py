"""Opens the disk tier of a rank: its records, and what their keys and values depend on besides tokens."""

from __future__ import annotations

from hashlib import blake2b

from windlass.config import EngineConfig
from windlass.models.file_digest import file_digest
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.runner.assemble import Assembled
from windlass.runner.load import Loaded
from windlass.tiers.disk import DiskStore
from windlass.tiers.fingerprint import Fingerprint

_DEFAULT_GB = 20.0
# Options that change keys and values without changing the device, the dtype or the layout.
_MODEL_OPTIONS = (
    *("load_format", "seed", "hf_overrides", "model_impl"),
    *("quantization", "quantize_head", "plain_kernels", "enforce_eager"),
)


def open_disk(
    config: EngineConfig, files: ModelFiles, hparams: HParams, *, loaded: Loaded, made: Assembled
) -> list[DiskStore]:
    """Open the store of --prefix-cache-dir, if there is one."""
    directory, size = config.cache.prefix_cache_dir, config.cache.prefix_cache_gb
    if directory is None:
        return []
    store = DiskStore(
        directory,
        fingerprint=kv_fingerprint(config, files, hparams, loaded=loaded, made=made),
        max_bytes=int((_DEFAULT_GB if size is None else size) * 2**30),
        record_bytes=made.record_bytes,
    )
    return [store]


def kv_fingerprint(
    config: EngineConfig,
    files: ModelFiles,
    hparams: HParams,
    *,
    loaded: Loaded,
    made: Assembled,
    on_many_hosts: bool = False,
) -> Fingerprint:
    """Identify the records of this rank. Reads samples of the weights' files.

    `on_many_hosts`: ignore the files' modification times, which differ between copies.
    """
    # The samples may miss a small change of a large file; its modification time shows the change.
    times = [] if on_many_hosts else [file.stat().st_mtime_ns for file in files.weights]
    digest = blake2b(file_digest(files, config.model).encode(), digest_size=16)
    digest.update(repr((times, hparams)).encode())
    parts, layout = loaded.parts, made.kv_format.layout
    model = {name: getattr(config.model, name) for name in _MODEL_OPTIONS}
    if files.weights:
        del model["seed"]
    options = {
        **{"device": parts.device.type, "dtype": str(parts.dtype)},
        **{name: value for name, value in model.items() if value},
        **{"prompt_rounding": config.scheduler.prompt_rounding},
        **{"tp": parts.mesh.tp.size, "pp": parts.mesh.pp.size},
    }
    if made.drafter_kv is not None:
        options["drafter"] = made.drafter_kv.identity
    if config.lora.enable_lora:
        options["lora_dtype"] = config.lora.lora_dtype
    return Fingerprint(
        model=files.name,
        weights=digest.hexdigest(),
        format=", ".join(f"{name}={value}" for name, value in options.items()),
        kv_dtype=str(made.kv_format.dtype).removeprefix("torch."),
        layout=repr(layout.groups),
        block_size=layout.block_size,
        rank=parts.mesh.world.rank,
        world=parts.mesh.world.size,
    )
