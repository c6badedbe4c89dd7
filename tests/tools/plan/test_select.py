"""Plans compared with engines built from them: exact bytes, limits, quality, choices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny as gguf_models
from tests.quant import packers
from tests.quant.folders import FFN, HIDDEN, loaded, rewrite, write_plain
from windlass.build import build_engine, open_model
from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.folders import cache_dir
from windlass.kernels.native import compiled, pool
from windlass.models.families.registry import read_hparams
from windlass.models.network import kv_layout
from windlass.runner.cuda.kv_copies import staging_bytes
from windlass.tools.plan import Plan, select_quantization
from windlass.tools.plan.formats import FORMATS
from windlass.tools.plan.speed import Machine, default_factor

GIB = 2**30
# Widths that are not multiples of a kernel tile, groups of 64 and of 32, and a tied head.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def plan(model: Path | str, **options: Any) -> Plan:
    """Plan with a given bandwidth by default, so that nothing is measured."""
    defaults = {"bandwidth": 1e11, "memory": GIB, "concurrency": 2, "num_threads": 1}
    return select_quantization(str(model), **{**defaults, **options})


def built_bytes(model: Path | str, **options: Any) -> dict[str, int]:
    config = EngineConfig.of(model=str(model), num_threads=1, **options)
    return build_engine(config, open_model(config).source).report.memory


@pytest.mark.parametrize("plain", [False, True])
def test_bytes_match_the_engine(tiny: Path, plain: bool) -> None:
    """With the native CPU kernels, which repack, and with the reference kernels, which do not."""
    kept = {"load_format": "dummy", "plain_kernels": plain, "device": "cpu"}
    found = plan(tiny, context=40, **kept)
    assert {item.format for item in found.candidates} == set(FORMATS)
    for item in found.candidates:
        if item.kv_dtype != "auto" and item.format != "int4":
            continue
        memory = built_bytes(tiny, **kept, **item.options)
        assert memory["weights"] == item.weight_bytes, item.name
        # Two requests of 40 tokens are six blocks of 16.
        assert memory["KV cache"] == 6 * 16 * item.kv_bytes_per_token, item.name


def test_untied_packed_embedding_is_counted(tmp_path: Path) -> None:
    name = "IQ2_XS"
    path = gguf_models.write_gguf(
        tmp_path / "m.gguf",
        kind=gguf_models.Type[name],
        tensors=gguf_models.block_tensors(name),
        metadata=gguf_models.TOKENIZER,
    )
    (item,) = plan(path, kv_cache_dtype="auto", device="cpu").candidates
    memory = built_bytes(path, num_blocks=4, device="cpu")
    assert memory["weights"] == item.weight_bytes


def test_gguf_bytes_match_the_engine(default_gguf: Path) -> None:
    (item,) = plan(default_gguf, kv_cache_dtype="auto", device="cpu").candidates
    assert item.format == "as stored"
    assert item.quality.basis == "typical"
    memory = built_bytes(default_gguf, num_blocks=4, device="cpu")
    assert memory["weights"] == item.weight_bytes


@pytest.mark.parametrize(
    ("pack", "settings", "typical"),
    [
        (
            partial(packers.awq, group=32),
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            0.977,
        ),
        (
            partial(packers.gptq, bits=4, group=32),
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
            0.961,
        ),
        (packers.fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}, 0.995),
    ],
)
def test_quantised_checkpoint_is_offered_only_as_stored(
    tmp_path: Path, pack: Any, settings: dict[str, Any], typical: float
) -> None:
    source = write_plain(tmp_path / "plain")
    model, _ = rewrite(source, tmp_path / "packed", lambda _, weight: pack(weight), settings)
    found = plan(model, kv_cache_dtype="auto", device="cpu")
    (item,) = found.candidates
    assert item.format == "as stored"
    assert item.quality.value == typical
    # An identity g_idx is only recognised when a GPTQ file is read.
    order_bytes = 4 * 2 * (3 * HIDDEN + FFN) if settings["quant_method"] == "gptq" else 0
    assert loaded(model, device="cpu").weight_bytes + order_bytes == item.weight_bytes
    assert set(found.refused) == set(FORMATS) - {"as stored"}
    assert "quantised already" in found.refused["int8"]


def test_format_whose_groups_do_not_divide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 144}))
    found = plan(tmp_path, load_format="dummy", kv_cache_dtype="auto")
    assert "none of these divides 144" in found.refused["int4"]
    assert "int8" in [item.format for item in found.candidates]


# ---- memory --------------------------------------------------------------------------------------


def test_one_byte_less_does_not_fit(tiny: Path) -> None:
    ask = partial(plan, tiny, load_format="dummy", formats=["int8"], kv_cache_dtype="auto")
    needed = ask().candidates[0].total_bytes
    exactly, less = ask(memory=needed), ask(memory=needed - 1)
    assert exactly.best is not None
    assert exactly.best.most_requests[256] == 2
    assert less.best is None
    assert less.candidates[0].missing_bytes == 1
    assert "the nearest is int8" in less.shortfall
    assert "1 B too much; it would fit with --concurrency 1" in less.shortfall


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_offload_is_counted(tiny: Path, device: str) -> None:
    """On a CPU the records themselves, on a GPU the staging of their copies."""
    ask = partial(plan, tiny, load_format="dummy", formats=["as stored"], kv_cache_dtype="auto")
    without, offloaded = (
        ask(device=device, memory=16 * GIB, bandwidth=1e12, **options).candidates[0]
        for options in ({}, {"kv_offload_gb": 1.5})
    )
    record_bytes = 16 * without.kv_bytes_per_token
    expected = int(1.5 * GIB) if device == "cpu" else staging_bytes(record_bytes)
    assert without.offload_bytes == 0
    assert offloaded.offload_bytes == expected
    assert offloaded.total_bytes == without.total_bytes + expected


def test_8_bit_kv_fits_more_requests(tiny: Path) -> None:
    found = plan(tiny, load_format="dummy", formats=["as stored"], device="cuda")
    auto, fp8, int8 = found.candidates
    assert auto.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert fp8.kv_bytes_per_token == int8.kv_bytes_per_token == 2 * 3 * 2 * (16 + 4)
    assert fp8.most_requests[256] > auto.most_requests[256]


def test_nearest_is_named_when_quality_is_too_low(tiny: Path) -> None:
    names = ["int4", "nf4"]
    found = plan(tiny, load_format="dummy", formats=names, kv_cache_dtype="auto", min_quality=0.99)
    assert found.best is None
    assert "the nearest is nf4, with 0.965 (assumed), 0.025 too little" in found.shortfall


# ---- another machine, speed ----------------------------------------------------------------------


def test_absent_gpu(tiny: Path) -> None:
    found = plan(tiny, load_format="dummy", device="cuda", bandwidth=1e12)
    sizes = {item.format: item.weight_bytes - item.copy_bytes for item in found.candidates}
    assert "16 bit" in found.refused  # the weights are stored so
    assert sizes["int4"] < sizes["int8"] < sizes["as stored"]
    assert sizes["int4+head"] > sizes["int4"]  # the tied head gets a copy of its own
    assert found.machine == Machine("cuda", 1e12, None, "as given", default_factor("cuda"))
    with pytest.raises(ConfigError, match="--memory 24GiB --bandwidth"):
        plan(tiny, load_format="dummy", device="cuda", bandwidth=None)


def test_step_time_is_the_longer_of_reads_and_gemms() -> None:
    machine = Machine("cuda", 1e9, 1e9, "as given", default_factor("cuda"))
    reading = machine.step_seconds(0.95e9, 1e3, 0)
    assert reading == pytest.approx(1.0)
    computing = machine.step_seconds(0.95e9, 1e9, 10)
    assert computing == pytest.approx(2.0 + 10 * machine.factor.layer_seconds)


def test_sliding_window_bounds_kv_reads() -> None:
    values = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    hparams = read_hparams(values)
    layout = kv_layout(hparams, 16, torch.float16)
    assert layout.bytes_read(256) == 64 * layout.token_bytes
    assert layout.bytes_read(32) == 32 * layout.token_bytes


def test_a_window_bounds_the_kv_cache(tmp_path: Path) -> None:
    values = {**CONFIG, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096}
    found = {}
    given = {"load_format": "dummy", "device": "cpu", "max_num_batched_tokens": 64}
    for window in (64, None):
        folder = tmp_path / str(window)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values | {"sliding_window": window}))
        asked = {"formats": ["as stored"], "kv_cache_dtype": "auto", "context": 4096}
        (found[window],) = plan(folder, concurrency=8, **asked, **given).candidates
    windowed, full = found[64], found[None]
    assert windowed.kv_bytes_per_token == full.kv_bytes_per_token
    block = 16 * full.kv_bytes_per_token
    assert full.options["kv_cache_memory_bytes"] == 8 * 256 * block
    # Seven requests hold the window and a block; one has the chunks of two steps as well.
    assert windowed.options["kv_cache_memory_bytes"] == (7 * (4 + 1) + 4 + 9) * block
    assert windowed.most_requests[4096] > 20 * full.most_requests[4096]
    memory = built_bytes(tmp_path / "64", **given, **windowed.options)
    assert memory["KV cache"] == windowed.options["kv_cache_memory_bytes"]


@pytest.fixture
def native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the native library from the user's cache wherever WINDLASS_CACHE points to: compiling it
    takes a minute.
    """
    monkeypatch.setattr(pool, "load", partial(compiled.load, cache_dir()))


@pytest.mark.usefixtures("native_library")
def test_measured_machine_is_cached(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    ask = partial(plan, tiny, load_format="dummy", formats=["as stored"], bandwidth=None)
    found = ask(memory=None)
    assert found.machine.source == "measured now"
    assert found.machine.bandwidth > 1e6
    assert found.machine.flops is not None
    assert found.memory_bytes > 0
    (cached,) = (tmp_path / "machine").iterdir()
    again = ask().machine
    assert again.source.endswith(f"cached in {cached}")
    assert (again.bandwidth, again.flops) == (found.machine.bandwidth, found.machine.flops)
    values = json.loads(cached.read_text())["limits"]
    for other in ({**values, "date": "2020-01-01"}, {**values, "flops": 0}, {"date": 1}, []):
        cached.write_text(json.dumps({"limits": other}))  # old, or damaged
        assert ask().machine.source == "measured now"


@pytest.mark.usefixtures("native_library")
def test_unwritable_cache_is_no_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file"))
    found = plan(tiny, load_format="dummy", formats=["as stored"], bandwidth=None)
    assert found.machine.source == "measured now"


def test_16_bit_gemms_on_a_cpu_are_not_estimated(tiny: Path) -> None:
    found = plan(tiny, load_format="dummy", formats=["as stored", "16 bit"], device="cpu")
    assert {item.tok_s_all is None for item in found.candidates if item.format == "16 bit"} == {
        True
    }
    assert found.best is not None
    assert found.best.format == "as stored"


def test_fastest_is_chosen_and_quality_breaks_ties(tiny: Path) -> None:
    ask = partial(plan, tiny, load_format="dummy", device="cuda", bandwidth=1e6, context=16)
    names = ["as stored", "fp8+head", "fp8-block+head", "int4+head", "nf4+head"]
    fast = ask(kv_cache_dtype="auto", formats=names)
    good = ask(kv_cache_dtype="auto", formats=names, min_quality=0.98)
    assert fast.best is not None
    assert good.best is not None
    assert fast.best.format in ("int4+head", "nf4+head")
    assert good.best.quality.value >= 0.98  # type: ignore[operator]
    # 8-bit formats read about the same number of bytes.
    alike = [item for item in good.candidates if item.format in ("fp8+head", "fp8-block+head")]
    assert good.best.format in [item.format for item in alike]
    assert good.best.quality.value == max(item.quality.value or 0.0 for item in alike)


def test_without_a_limit_4_bits_are_chosen_only_where_more_do_not_fit(tiny: Path) -> None:
    ask = partial(plan, tiny, load_format="dummy", device="cuda", bandwidth=1e6, context=16)
    names = ["as stored", "fp8", "int4+head"]
    roomy = ask(kv_cache_dtype="auto", formats=names, min_quality=None)
    assert roomy.best is not None
    assert roomy.faster is not None
    assert (roomy.best.format, roomy.faster.format) == ("fp8", "int4+head")
    assert roomy.min_quality == 0.99
    packed = [item for item in roomy.candidates if item.format == "int4+head"]
    assert all(item.copy_bytes for item in packed)
    small = min(item.total_bytes - item.copy_bytes for item in packed)
    tight = ask(kv_cache_dtype="auto", formats=names, min_quality=None, memory=small)
    assert tight.best is not None
    assert tight.best.format == "int4+head"
    assert tight.faster == tight.best


# ---- quality -------------------------------------------------------------------------------------


def write_record(path: Path, model: str, ratio: float, date: str, **options: Any) -> None:
    sides = {
        "model": {"name": model, "options": options},
        "reference": {"name": model, "options": {}},
    }
    rows = [{"label": "all", "ppl_ratio": ratio}]
    record = {"name": "quality", "rows": rows, "settings": sides, "date": date}
    path.write_text(json.dumps(record))


def test_eval_records_take_precedence_over_typical_figures(tiny: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "old.json", tiny.name, 1.5, "2026-01-01", quantization="int4")
    write_record(tmp_path / "new.json", tiny.name, 1.25, "2026-02-01", quantization="int4")
    write_record(tmp_path / "kv.json", tiny.name, 1.0, "2026-02-01", kv_cache_dtype="int8")
    write_record(tmp_path / "other.json", "other", 9.0, "2026-03-01", quantization="int8")
    (tmp_path / "speed.json").write_text(json.dumps({"name": "throughput", "rows": []}))
    found = plan(tiny, load_format="dummy", formats=["int4", "int8"], records=tmp_path)
    quality = {(item.format, item.kv_dtype): item.quality for item in found.candidates}
    assert quality["int4", "auto"].value == 0.8
    assert quality["int4", "auto"].basis == "measured"
    assert "new.json" in quality["int4", "auto"].source
    assert quality["int4", "int8"].basis == "measured"  # both were measured
    assert quality["int8", "auto"].basis == "typical"
    assert quality["int4", "fp8"].basis == "assumed"


def test_bench_formats_rows_are_used_without_eval_records(tiny: Path, tmp_path: Path) -> None:
    rows = [
        {"format": "float32", "perplexity": 30.0},
        {"format": "int4", "increase_pct": 1.0, "served_increase_pct": 25.0},
        {"format": "int4+head", "increase_pct": 1.0, "served_increase_pct": 100.0},
        {"format": "int8", "increase_pct": -0.1, "served_increase_pct": -0.1},
        {"format": "gptq-4", "increase_pct": 10.0, "served_increase_pct": 10.0},
        {"format": "kv-int8", "increase_pct": 0.0, "served_increase_pct": 9.0},
        {"format": "nf4", "error": "failed"},
    ]
    settings = {"name": tiny.name}
    record = {"name": "formats", "rows": rows, "settings": settings, "date": "2026-05-01"}
    (tmp_path / "formats.json").write_text(json.dumps(record))
    write_record(tmp_path / "eval.json", tiny.name, 1.0101, "2026-01-01", quantization="int8")
    names = ["int4", "int4+head", "int8", "nf4"]
    found = plan(tiny, load_format="dummy", formats=names, records=tmp_path)
    quality = {(item.format, item.kv_dtype): item.quality for item in found.candidates}
    assert quality["int4", "auto"].value == 0.8
    assert "formats.json" in quality["int4", "auto"].source
    assert quality["int4+head", "auto"].value == 0.5
    assert quality["int4", "int8"].value == 0.8  # the cache loses nothing
    assert quality["int4", "int8"].basis == "measured"
    assert quality["int8", "auto"].value == 0.99  # from eval, although it is older
    assert quality["nf4", "auto"].basis == "assumed"


def test_incomplete_record_is_an_error(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps({"name": "quality", "rows": []}))
    with pytest.raises(ConfigError, match=r"bad\.json says that it is a record"):
        plan(tiny, load_format="dummy", records=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "--memory must be above 0"),
        ({"bandwidth": 0.0}, "--bandwidth must be above 0"),
        ({"concurrency": 0}, "--concurrency must be at least 1"),
        ({"context": 0}, "--context must be from 1 to the model's 256"),
        ({"context": 257}, "--context must be from 1 to the model's 256"),
        ({"min_quality": 1.5}, "--min-quality must be from 0 to 1"),
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype must be one of auto, fp8, int8"),
        ({"formats": ["int3"]}, "--formats: 'int3' is not a format. Known: as stored"),
        ({"formats": []}, "--formats: nothing is not a format"),
        ({"records": Path("no/such/folder")}, "there is no such folder"),
        ({"max_num_batched_tokens": 1}, "is below --max-num-seqs"),
    ],
)
def test_bad_input(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tiny, load_format="dummy", **options)


def test_nothing_is_read_or_allocated(tmp_path: Path) -> None:
    """Layers of a 405B model are planned quickly."""
    huge = {**CONFIG, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 16}
    huge |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    found = plan(tmp_path, load_format="dummy", device="cuda", formats=["as stored", "int4"])
    assert found.best is None
    assert found.candidates[0].weight_bytes > 90 * GIB
