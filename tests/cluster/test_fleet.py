"""The fleet file: what it means, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from windlass.cli.main import app
from windlass.cluster.fleet import Fleet, read_fleet
from windlass.cluster.quality import read_probes
from windlass.errors import ConfigError

MODEL = {"name": "chat"}


def read(folder: Path, **fields: Any) -> Fleet:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"models": [MODEL], **fields}))
    return read_fleet(path)


def test_a_fleet_of_one_line(tmp_path: Path) -> None:
    fleet = read(tmp_path)
    (model,) = fleet.models
    assert (model.model, model.replicas.min, model.replicas.max) == ("default", 1, 1)
    assert model.engine.model.served_model_name == ("chat",)
    assert model.engine.model.num_threads == 1  # replicas share the cores of a machine
    assert model.bundles() == [{"CPU": 1.0}]
    config = fleet.serve_config(model)
    assert (config.host, config.port, config.keys_file) == ("127.0.0.1", 8000, None)


def test_all_fields(tmp_path: Path) -> None:
    model = {
        "name": "chat",
        "model": "default",
        "options": {"max-num-seqs": 16, "tensor_parallel_size": 2, "device": "cuda"},
        "adapters": {"sql": "adapters/sql"},
        "replicas": {"min": 0, "max": 3},
        "cpus": 4,
        "gpus": 2,
        "autoscaling": {"ttft_s": 0.5},
    }
    fleet = read(
        tmp_path,
        models=[model],
        tenants="keys.yaml",
        serve={"max_num_queued_reqs": 7},
        prices={"gpu_hour": 3, "cpu_hour": 0.25},
    )
    (made,) = fleet.models
    assert made.engine.scheduler.max_num_seqs == 16
    assert made.engine.lora.modules() == {"sql": str(tmp_path / "adapters/sql")}
    assert made.bundles() == [{"CPU": 4.0, "GPU": 2.0}]
    assert made.targets().ttft_s == 0.5
    assert made.targets().max_replicas == 3
    config = fleet.serve_config(made)
    assert config.max_num_queued_reqs == 7
    assert config.keys_file == str(tmp_path / "keys.yaml")
    assert config.price_per_hour == 7.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modles": []}, "unknown field 'modles'. Did you mean 'models'?"),
        ({"models": []}, "models: List should have at least 1 item"),
        (
            {"models": [{"nme": "a", "name": "a"}]},
            "models.0: unknown field 'nme'. Did you mean 'name'?",
        ),
        (
            {"models": [{**MODEL, "replicas": {"min": 3, "max": 1}}]},
            "models.0.replicas: min is 3, above max 1.",
        ),
        ({"models": [{**MODEL, "replicas": 2.5}]}, "or min: N and max: N; got 2.5."),
        ({"models": [{**MODEL, "replicas": {"mn": 1}}]}, "models.0.replicas: unknown field 'mn'"),
        ({"models": [MODEL, MODEL]}, "two models or adapters of the fleet have the name 'chat'"),
        ({"models": [{"name": "a b"}]}, "a name has up to 64 letters"),
        ({"models": [{**MODEL, "gpus": 2}]}, "gpus is 2, and a replica has 1 ranks"),
        (
            {"models": [{**MODEL, "options": {"device": "cuda"}}]},
            "gpus is 0, and options has device: cuda",
        ),
        (
            {"models": [{**MODEL, "options": {"max_num_seq": 1}}]},
            "model 'chat': unknown option 'max_num_seq'. Did you mean 'max_num_seqs'?",
        ),
        (
            {"models": [{**MODEL, "options": {"max_num_seqs": "many"}}]},
            "model 'chat': --max-num-seqs must be a whole number; got 'many'.",
        ),
        (
            {"models": [{**MODEL, "options": {"enable_lora": "no"}}]},
            "--enable-lora must be true or false; got 'no'.",
        ),
        (
            {"models": [{**MODEL, "options": {"memory_share": [0.5]}}]},
            "--memory-share must be a number; got [0.5].",
        ),
        ({"serve": {"hang_timeout": "2 s"}}, "--hang-timeout must be a number; got '2 s'."),
        (
            {"models": [{**MODEL, "options": {"data_parallel_size": 2}}]},
            "data_parallel_size cannot be set here: a fleet has `replicas:`",
        ),
        ({"serve": {"port": 1}}, "serve: port cannot be set here"),
        ({"serve": {"fallback": ["b"]}}, "write `fallbacks:` in the model"),
        ({"models": [{**MODEL, "fallbacks": ["b"]}]}, "'b' is not another model of the fleet"),
        ({"models": [{**MODEL, "fallbacks": ["chat"]}]}, "'chat' is not another model"),
        (
            {"models": [{**MODEL, "fallbacks": ["b", "b"]}, {"name": "b"}]},
            "fallbacks: 'b' is there twice",
        ),
        ({"models": [{**MODEL, "fallbacks": [{}]}]}, "expected model: NAME, max_tokens: N"),
        (
            {"models": [{**MODEL, "fallbacks": [{"modle": "b"}]}]},
            "models.0.fallbacks.0: unknown field 'modle'. Did you mean 'model'?",
        ),
        ({"serve": {"ssl_certfile": "a"}}, "put TLS in front of it"),
        (
            {"serve": {"admin_key": ["a" * 20], "lora_root": ["/tmp"]}},
            "lora_root does nothing without a model that takes adapters",
        ),
        (
            {
                "serve": {"admin_key": ["a" * 20], "lora_root": ["/tmp"]},
                "ingress": {"replicas": 2},
                "models": [{**MODEL, "options": {"enable_lora": True}}],
            },
            "each would know other adapters",
        ),
        (
            {"prices": {"gpu_hour": -1}},
            "prices.gpu_hour: Input should be greater than or equal to 0",
        ),
        (
            {"tenants": "keys.yaml", "ingress": {"replicas": 2}},
            "each would count the limits of `tenants` on its own",
        ),
        ({"models": [{**MODEL, "adapters": {"chat": "x"}}]}, "is the name of the model itself"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **fields)
    assert str(caught.value).startswith(f"{tmp_path / 'fleet.yaml'}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be parsed: line"),
        ("- 1", "expected fields such as"),
        ("a: 1\na: 2", "twice"),
    ],
)
def test_a_broken_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_fleet(path)


def test_the_plan_counts_replicas_memory_and_cost(tmp_path: Path, tiny_model: Path) -> None:
    fleet = {
        "models": [
            {
                "name": "tiny",
                "model": str(tiny_model),
                "cpus": 2,
                "replicas": {"min": 1, "max": 4},
                "options": {"max_num_seqs": 8},
            }
        ],
        "prices": {"cpu_hour": 0.05},
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(fleet))
    result = CliRunner().invoke(app, ["cluster", "plan", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)
    assert (plan["min_replicas"], plan["max_replicas"], plan["concurrency"]) == (1, 4, 8)
    assert plan["min_per_hour"] == pytest.approx(0.1)
    assert plan["max_per_hour"] == pytest.approx(0.4)
    assert 0 < plan["weight_bytes"] < plan["total_bytes"]
    text = CliRunner().invoke(app, ["cluster", "plan", str(path)])
    assert "1 to 4, each with 2 CPUs" in text.stdout
    assert "$0.10 to $0.40 per hour" in text.stdout


def test_a_bad_file_is_an_error_of_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cluster", "plan", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "No such file" in result.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tenants": "none.yaml"}, "No such file or directory"),
        ({"models": [{**MODEL, "adapters": {"sql": "none"}}]}, "model 'chat': adapter 'sql': "),
        (
            {"models": [{**MODEL, "rollout": {"canary": "10%", "quality": "none.jsonl"}}]},
            "none.jsonl: No such file or directory",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "up"])
def test_a_file_that_is_missing_is_an_error_before_anything_starts(
    tmp_path: Path, command: str, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"models": [MODEL], **fields}))
    result = CliRunner().invoke(app, ["cluster", command, str(path)])
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


def test_updates_of_a_model(tmp_path: Path) -> None:
    fleet = read(
        tmp_path, models=[{**MODEL, "rollout": {"canary": "12.5%", "quality": "probes.jsonl"}}]
    )
    rollout = fleet.models[0].rollout
    assert rollout.quality == str(tmp_path / "probes.jsonl")
    config = rollout.config(9)
    assert (config.canary_share, config.min_requests, config.min_scores) == (0.125, 200, 9)
    assert read(tmp_path).models[0].rollout.config().min_requests == 0  # no canary
    for rollout, reason in (
        ({"canary": "120%"}, "canary"),
        ({"canary": "much"}, "canary"),
        ({"quality": "probes.jsonl"}, "Set canary"),
        ({"max_surge": 0}, "max_unavailable"),
        ({"canary": 0.1, "max_surge": 0, "max_unavailable": 1}, "a canary is a further replica"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read(tmp_path, models=[{**MODEL, "rollout": rollout}])


def test_a_warm_pool_needs_a_model_that_may_stop(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="min: 0"):
        read(tmp_path, warm_pool={"memory_gb": 1})
    models = [MODEL, {"name": "rare", "replicas": {"min": 0, "max": 1}}]
    fleet = read(tmp_path, models=models, warm_pool={"memory_gb": 1.5, "idle_s": 3})
    assert [fleet.pools(model) for model in fleet.models] == [False, True]
    assert fleet.warm_pool is not None
    assert fleet.warm_pool.config().memory_bytes == 3 * 2**29


def test_probes_of_the_quality_gate(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    line = json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n"
    path.write_text(9 * line)
    assert len(read_probes(str(path))) == 9
    for text, reason in (
        (7 * line, "has 7 prompts"),
        (line + '{"prompt": 1}', "line 2"),
        (line + '{"prompt": "a", "answer": ""}', "line 2: the answer is empty"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            read_probes(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        read_probes(str(tmp_path / "none"))
