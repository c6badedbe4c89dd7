"""Flags generated from dataclasses: types, aliases, help texts, and config files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest
import typer

from tests.cli.conftest import Invoke
from windlass.cli.command import register
from windlass.cli.config_file import read_config
from windlass.cli.options import ENGINE_OPTIONS, SERVE_OPTIONS, options_of, parse_size
from windlass.cli.sampling import SAMPLING_OPTIONS, WITHOUT_FLAG
from windlass.config import EngineConfig, ServeConfig, option
from windlass.core.sampling import SamplingParams
from windlass.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5 kb", 1500),
        ("64", 64),
        (64, 64),
        ("7b", 7),
        ("4G", 4 * 2**30),
        ("4g", 4 * 10**9),
    ],
)
def test_sizes_have_units(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"record_share": 0.5}, "--record-traffic FILE"),
        ({"record_max_bytes": 1000}, "--record-traffic FILE"),
        ({"max_file_bytes": 1000}, "--data-dir FOLDER"),
        ({"max_data_bytes": 1000}, "--data-dir FOLDER"),
        ({"max_num_batch_reqs": 2}, "--data-dir FOLDER"),
        ({"uds_mode": "660"}, "--uds PATH"),
    ],
)
def test_an_option_without_effect_is_an_error(given: dict[str, object], needed: str) -> None:
    (name,) = given
    with pytest.raises(
        ConfigError, match=f"--{name.replace('_', '-')} does nothing without {needed}"
    ):
        ServeConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "GiB", "4X", "-1MiB", "4 GiBs", "1e9"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


@dataclass(frozen=True, kw_only=True)
class _Sample:
    whole: int = option(3, "A number.")
    share: float | None = option(None, "A share.", "--part")
    lever: bool = option(True, "A lever.", "--enable-lever")
    kind: Literal["a", "b"] = option("a", "A kind.")
    names: tuple[str, ...] = option((), "Names.")
    table: Mapping[str, int] = option({}, "A table.")
    limit_bytes: int = option(2**20, "A limit.")


def _parsed(*args: str) -> dict[str, object]:
    """The options that a command with the sample's flags receives."""
    from typer.testing import CliRunner

    seen: dict[str, object] = {}

    def probe(options: object) -> int:
        seen.update(options.values)  # type: ignore[attr-defined]
        return 0

    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    register(app, probe, options_of(_Sample, "Sample"))
    result = CliRunner().invoke(app, ["probe", *args])
    assert result.exit_code == 0, result.output
    return seen


def test_flags_that_are_not_given_are_absent() -> None:
    assert _parsed() == {}


def test_every_kind_of_field_is_a_flag() -> None:
    args = "m --whole 4 --part 0.5 --no-lever --kind b --names x --names y --limit-bytes 2KiB"
    assert _parsed(*args.split(), "--table", '{"k": 1}') == {
        "model": "m",
        "whole": 4,
        "share": 0.5,
        "lever": False,
        "kind": "b",
        "names": ["x", "y"],
        "table": {"k": 1},
        "limit_bytes": 2048,
    }


def test_an_alias_works_for_a_switch_too() -> None:
    assert _parsed("--enable-lever") == {"lever": True}
    assert _parsed("--no-enable-lever") == {"lever": False}


def test_every_sampling_field_has_a_flag_or_is_listed_without_one() -> None:
    offered = {item.name for item in SAMPLING_OPTIONS}
    assert offered | set(WITHOUT_FLAG) == {item.name for item in fields(SamplingParams)}


def _yaml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "windlass.yaml"
    path.write_text(text)
    return path


def test_a_config_file_uses_the_names_of_flags(tmp_path: Path) -> None:
    path = _yaml(
        tmp_path,
        "max-num-seqs: 4\nmax_body_bytes: 1MiB\ngpu-memory-utilization: 1\nprefix-caching: false\n"
        "api-key: [a, b]\nallowed-origins: x\nhf-overrides: {a: 1}\nuds:\n",
    )
    assert read_config(path, [*ENGINE_OPTIONS, *SERVE_OPTIONS]) == {
        "max_num_seqs": 4,
        "max_body_bytes": 2**20,
        "memory_share": 1.0,
        "prefix_caching": False,
        "api_key": ["a", "b"],
        "allowed_origins": ["x"],
        "hf_overrides": {"a": 1},
        "uds": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 4", "unknown option 'max-num-seq' for this command. Did you mean 'max-num-"),
        ("port: '80'", "port: expected a whole number. Got '80'"),
        ("profile: fast", "profile: expected one of chat, batch, hybrid. Got 'fast'"),
        ("port: true", "port: expected a whole number"),
        ("prefix-caching: 1", "expected true or false"),
        ("api-key: [1]", "expected a text, or a list of these"),
        ("max-body-bytes: 4X", "is not a size"),
        ("hf-overrides: [1]", "expected a JSON object"),
        ("port: 1\nPORT: 2", "unknown option 'PORT'"),
        ("memory-share: 0.5\nmemory_share: 0.6", "given twice"),
        ("- port", "holds a YAML list"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_an_invalid_config_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(_yaml(tmp_path, text), [*ENGINE_OPTIONS, *SERVE_OPTIONS])


def test_flags_take_precedence_over_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text("model: from-file\nwhole: 1\nkind: b\n")
    assert _parsed("--config", str(path), "--whole", "2") == {
        "model": "from-file",
        "whole": 2,
        "kind": "b",
    }


def test_a_missing_config_file_exits_with_2(windlass: Invoke) -> None:
    outcome = windlass("serve", "--config", "nowhere.yaml")
    assert outcome.code == 2
    assert "--config nowhere.yaml: No such file" in outcome.err


def test_sizes_have_units_in_python_and_in_fleet_files_too() -> None:
    config = EngineConfig.of(kv_cache_memory_bytes="512MiB")
    assert config.cache.kv_cache_memory_bytes == 512 * 2**20
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes: '4 GiBs' is not a size"):
        EngineConfig.of(kv_cache_memory_bytes="4 GiBs")
