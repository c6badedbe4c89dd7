"""`windlass plan` from the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer

from tests.tools.conftest import Windlass
from windlass.cli.command import Options, register
from windlass.cli.options import ENGINE_OPTIONS, GATE_OPTIONS, SERVE_OPTIONS
from windlass.cli.plan import serve_command
from windlass.config import EngineConfig

FIXED = ("--load-format", "dummy", "--num-threads", "1", "--bandwidth", "100GB/s")


def parsed(command: str) -> EngineConfig:
    """Parse the command line as `serve` does."""
    made: list[EngineConfig] = []

    def serve(options: Options) -> int:
        made.append(options.engine())
        return 0

    app = typer.Typer()
    register(app, serve, [*ENGINE_OPTIONS, *SERVE_OPTIONS, *GATE_OPTIONS])
    words = shlex.split(command)
    assert words[:2] == ["windlass", "serve"]
    app(words[2:], standalone_mode=False)
    return made[0]


def test_recommended_command_is_accepted_by_serve(
    windlass: Windlass, tiny: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.json"
    args = ("--memory", "1GiB", "--context", "100", "--concurrency", "3", "--json", output)
    shown = windlass("plan", tiny, *FIXED, *args, "--formats", "int8+head", "--block-size", "32")
    written = json.loads(output.read_text())
    assert f"  {written['command']}\n" in shown
    assert "Recommended: int8+head" in shown
    config = parsed(written["command"])
    assert config.model.model == str(tiny)
    assert (config.model.quantization, config.model.quantize_head) == ("int8", True)
    assert (config.model.max_model_len, config.scheduler.max_num_seqs) == (100, 3)
    assert (config.model.load_format, config.cache.block_size) == ("dummy", 32)
    assert config.cache.kv_cache_dtype == written["best"]["kv_dtype"]
    per_token = written["best"]["kv_bytes_per_token"]
    assert config.cache.kv_cache_memory_bytes == 3 * 4 * 32 * per_token


def test_command_keeps_flags_but_no_secrets() -> None:
    given = {"hf_token": "secret", "hf_overrides": {"a": "b c"}, "overlap": False}
    command = serve_command(given, {"quantization": "int4"})
    assert "secret" not in command
    config = parsed(command)
    assert config.model.hf_overrides == {"a": "b c"}
    assert config.scheduler.overlap is False
    assert config.model.model == "default"


def test_table_shows_sources_and_refused_formats(windlass: Windlass, tiny: Path) -> None:
    shown = windlass("plan", tiny, *FIXED, "--memory", "64MiB")
    assert "as stored" in shown
    assert "0.955 t" in shown
    assert "100.0 GB/s (as given)" in shown
    assert "requests that fit with" in shown


def test_nothing_fits_exit_code_1(windlass: Windlass, tiny: Path) -> None:
    shown = windlass("plan", tiny, *FIXED, "--memory", "64KiB", code=1)
    assert "No choice: nothing fits into 64.0 KiB: the nearest is" in shown
    assert "not even one request" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "8Gig"], "'8Gig' is not a size"),
        (["--memory", "-1"], "'-1' is not a size"),
        (["--bandwidth", "fast"], "'fast' is not a size"),
        (["--min-quality", "good"], "'good' is not a share"),
        (["--min-quality", "95"], "--min-quality must be from 0 to 1"),
        (["--context", "513"], "the model's 512 positions"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--formats", "int5"], "'int5' is not a format"),
        (["--kv-cache-dtype", "fp4"], "--kv-cache-dtype must be one of"),
        (["--quantization", "int4"], "--quantization is chosen by the plan"),
    ],
)
def test_bad_input_exit_code_2(
    windlass: Windlass, tiny: Path, args: list[str], message: str
) -> None:
    shown = windlass("plan", tiny, *FIXED, *args, code=2)
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown
