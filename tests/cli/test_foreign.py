"""Flags of vLLM, SGLang and llama.cpp on the command line and in config files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from windlass.cli import options as ours
from windlass.cli.command import register
from windlass.cli.config_file import read_config
from windlass.cli.foreign import markdown
from windlass.cli.foreign_flags import BY_NAME, FOREIGN_FLAGS, MODEL
from windlass.cli.options import parse_whole
from windlass.cli.sampling import SAMPLING_OPTIONS
from windlass.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENGINE = [*ours.ENGINE_OPTIONS, *ours.LORA_OPTIONS, *ours.PARALLEL_OPTIONS]
SERVER = [*ENGINE, *ours.SERVE_OPTIONS]


def _run(line: str, options: list[ours.Option] = SERVER) -> tuple[dict[str, Any], str]:
    """The values that a command receives, and its messages."""
    seen: dict[str, Any] = {}

    def probe(given: Any) -> int:
        seen.update(given.values)
        seen["notes"] = list(given.notes)
        return 0

    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    register(app, probe, options)
    result = CliRunner().invoke(app, ["probe", *shlex.split(line)])
    assert result.exit_code in (0, 2), result.output
    return seen, result.stderr


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--model org/m", {"model": "org/m"}),
        ("--model-path=m --tp-size 2", {"model": "m", "tensor_parallel_size": 2}),
        ("m -tp 2 --pp 3 --dp-size 4", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("m --dtype half --max_model_len 4k", {"dtype": "float16", "max_model_len": 4000}),
        ("m --max-model-len 1K", {"max_model_len": 1024}),
        ("m --served-model-name a b", {"model": "m", "served_model_name": ["a", "b"]}),
        ("--served-model-name a m", {"model": "m", "served_model_name": ["a"]}),
        ("--served-model-name a b --model m", {"served_model_name": ["a", "b"]}),
        ("--lora-modules a=x b=y -m m", {"lora_modules": ["a=x", "b=y"], "model": "m"}),
        ("--lora-modules a=x b=y", {"lora_modules": ["a=x", "b=y"]}),
        ('--lora-modules \'{"name": "a", "path": "x"}\'', {"lora_modules": ["a=x"]}),
        ("m --lora-paths a=x", {"enable_lora": True, "lora_modules": ["a=x"]}),
        ("""m --allowed-origins '["http://a", "*"]'""", {"allowed_origins": ["http://a", "*"]}),
        ("m --cors-origins a,b", {"allowed_origins": ["a", "b"]}),
        ("m --api-key a b", {"api_key": ["a", "b"]}),
        ("-m f.gguf -c 4096 -np 8 -t 3", {"max_model_len": 4096, "max_num_seqs": 8}),
        ("m -c 0", {"max_model_len": None}),
        ("m -ngl 0", {"device": "cpu"}),
        ("m -ctk q8_0 -ctv q8_0", {"kv_cache_dtype": "int8"}),
        ("m --mem-fraction-static 0.8 --page-size 32", {"memory_share": 0.8, "block_size": 32}),
        ("m --disable-radix-cache --disable-cuda-graph", {"prefix_caching": False}),
        ("m --chunked-prefill-size -1", {"enable_chunked_prefill": False}),
        ("m --speculative-algorithm EAGLE3 --spec-model h", {"spec": "eagle", "spec_model": "h"}),
        (
            """m --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'""",
            {"spec": "ngram", "spec_tokens": 4, "spec_ngram_max": 3},
        ),
        ("""m -sc '{"model": "d"}'""", {"spec": "draft", "spec_model": "d"}),
        ("m -md d", {"spec": "draft", "spec_model": "d"}),
        ("""m --hf-overrides '{"a": 1}' --rope-theta 5""", {"hf_overrides": {"a": 1, "rope_theta": 5.0}}),
        (
            "m --temp 0.5 --top-k 3 -n 9",
            {
                "override_generation_config": {
                    "temperature": 0.5,
                    "top_k": 3,
                    "max_new_tokens": 9,
                }
            },
        ),
        ("m --dist-init-addr h:5", {"master_addr": "h", "master_port": 5}),
        ("m --tool-call-parser qwen25 --reasoning-parser deepseek_r1", {"tool_call_parser": "hermes", "reasoning_parser": "think"}),
        ("m --runner pooling --pooling mean", {"task": "embed", "pooling_type": "mean"}),
        ("m --api-server-count 2 --no-webui", {"http_workers": 2, "console": False}),
        ("m --quantization bitsandbytes", {"quantization": "nf4"}),
    ],
)  # fmt: skip
def test_a_flag_with_an_equivalent_sets_it(line: str, values: dict[str, Any]) -> None:
    seen, errors = _run(line)
    assert errors == ""
    assert {name: seen.get(name) for name in values} == values
    assert seen["notes"] == []


def test_sampling_flags_are_those_of_the_command_where_it_has_them() -> None:
    seen, _ = _run("m --temp 0.5 -n 9 --repeat-penalty 1.5", [*ENGINE, *SAMPLING_OPTIONS])
    wanted = {"temperature": 0.5, "max_tokens": 9, "repetition_penalty": 1.5}
    assert {name: seen[name] for name in wanted} == wanted
    assert "override_generation_config" not in seen


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--disable-uvicorn-access-log m", "--enable-log-requests adds a line per request"),
        ("m --swap-space 4", "recomputed, not swapped"),
        ("m -fa on --jinja", "kernels are chosen for the device"),
        ("m -fa", "kernels are chosen"),
        ("m --compilation-config '{\"level\": 3}' -O3", "nothing is compiled by torch"),
        ("m -q awq", "read from the checkpoint"),
        ("m -ngl 99", "--device cpu uses no GPU"),
        ("m --cuda-graph-bs 1 2 4", "captured graphs"),
    ],
)
def test_a_flag_without_effect_is_a_line_in_the_log(line: str, note: str) -> None:
    seen, _ = _run(line)
    assert seen["model"] == "m"
    assert note in seen["notes"][0]
    assert note in _run(line, ENGINE)[1]  # a command without a log prints it


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--trust-remote-code m", "--trust-remote-code: Windlass never runs code"),
        ("m --cpu-offload-gb 4", "--cpu-offload-gb 4: the whole model"),
        ("m --distributed-executor-backend ray", "Ray and external launchers"),
        ("m -c 1 --max-model-len 2", "-c and --max-model-len both set --max-model-len"),
        ("m -ctk q8_0 -ctv f16", "-ctk and -ctv both set --kv-cache-dtype"),
        ("a --model b", "the model is given twice: a and --model b"),
        ("m --max-model-len 4x", "Write 4096, 4k (4,000) or 4K (4,096)"),
        ("""m -sc '{"method": "tree"}'""", "speculation method 'tree' is unknown"),
        ("""m -sc '{"method": "ngram", "depth": 2}'""", "'depth' has no equivalent"),
        ("m --speculative-config x", "'x' is not JSON"),
        ("m -c", "-c needs a value"),
        ("m --prefix-caching=true", "--prefix-caching takes no value, got 'true'"),
        ("m --disable-radix-cache=1", "--disable-radix-cache takes no value"),
        ("m --temp warm", "'warm' is not a number"),
        ("m --port2 1", "No such option"),
    ],
)
def test_other_flags_are_errors_with_the_reason(line: str, message: str) -> None:
    seen, errors = _run(line)
    assert seen == {}
    assert message in " ".join(errors.split())


def test_a_command_without_the_equivalent_does_not_know_the_flag() -> None:
    assert "No such option" in _run("m --fastapi-root-path /x", ENGINE)[1]


def test_arguments_behind_two_dashes_stay() -> None:
    seen, _ = _run("--temp 1 -- -m")
    assert seen["model"] == "-m"


def test_a_config_file_may_have_names_of_other_engines(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model-path: m\ntp-size: 2\ndtype: half\nmem_fraction_static: 0.5\nserved-model-name: [a, b]\n"
        "disable-radix-cache: true\nlog-requests: false\nenable-metrics: true\ncontext-length: 4k\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 2}\nport: 1\n"
    )
    notes: list[str] = []
    assert read_config(path, [ours.MODEL_ARGUMENT, *SERVER], notes.append) == {
        "model": "m",
        "tensor_parallel_size": 2,
        "dtype": "float16",
        "memory_share": 0.5,
        "served_model_name": ["a", "b"],
        "prefix_caching": False,
        "max_model_len": 4000,
        "spec": "ngram",
        "spec_tokens": 2,
        "port": 1,
    }
    assert ["enable-metrics: GET /metrics is always on" in note for note in notes] == [True]
    path.write_text("trust-remote-code: true")
    with pytest.raises(ConfigError, match="trust-remote-code: Windlass never runs code"):
        read_config(path, SERVER)


@pytest.mark.parametrize("text", ["", "k", "4kk", "1e999k", "4 k4"])
def test_whole_numbers_are_checked(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a whole number"):
        parse_whole(text)


def test_the_table_is_consistent() -> None:
    rows = [row for rows in FOREIGN_FLAGS.values() for row in rows]
    assert len(BY_NAME) == sum(len(row.names) for row in rows)  # no name twice
    own = {MODEL} | {name for option in [*SERVER, *SAMPLING_OPTIONS] for name in _names(option)}
    values = {
        "auto",
        "none",
        "priority",
        "draft",
        "json",
        "0",
        "embed",
        "score",
        "…",
    }  # words behind a flag
    for row in rows:
        assert bool(row.ours) or bool(row.note or row.refusal), row.names
        assert set(row.ours.split()) - values <= own, row.names
        assert row.extends_ours or row.sampling or not set(row.names) & own, row.names


def _names(option: ours.Option) -> list[str]:
    names = [option.flag, *option.aliases]
    return [*names, *(f"--no-{name[2:]}" for name in names)] if option.is_switch else names


def test_the_docs_show_the_table() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert markdown() in page, "replace the tables by the output of: python -m windlass.cli.foreign"
