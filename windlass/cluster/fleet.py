"""The file of a fleet: models with their replicas, options, targets and prices.

models:
  - name: chat
    model: org/name
    options: {max_num_seqs: 64, tensor_parallel_size: 2}
    gpus: 2
    replicas: {min: 1, max: 8}
prices: {gpu_hour: 3.5}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from windlass.cluster.autoscaling import ScalingTargets
from windlass.cluster.rollout import RolloutConfig
from windlass.cluster.warm_pool import WarmPoolConfig
from windlass.config import EngineConfig, ServeConfig, split_options
from windlass.errors import ConfigError
from windlass.serve.fallback import FallbackStep
from windlass.serve.fields import unknown_field, validation_error
from windlass.serve.keys_file import StrictLoader, one_line

_MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Routing = Literal["prefix", "power-of-two", "round-robin"]


def _percent(value: Any) -> Any:
    """10% is 0.1."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value):
        return float(value[:-1]) / 100
    return value


Share = Annotated[float, BeforeValidator(_percent), Field(gt=0, le=1)]

# Options of the server that do not make sense where Ray Serve listens, or where replicas are many.
_NOT_IN_FLEET = {
    **dict.fromkeys(("host", "port"), "the file has them at its top"),
    **dict.fromkeys(
        ("uds", "uds_mode", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh"),
        "Ray Serve's proxy listens; put TLS in front of it",
    ),
    **dict.fromkeys(("http_workers", "max_connections"), "`ingress: {replicas: N}` adds processes"),
    "keys_file": "write `tenants: FILE` at the top",
    "price_per_hour": "write `prices:` at the top",
    "data_dir": "files and batches need one server; run `windlass serve` beside the fleet",
    "fallback": "write `fallbacks:` in the model",
    "slo_admission": "the autoscaling has the target of the first token",
}
_FOLDERS = ("lora_root", "lora-root")  # options of `serve` that are lists of folders
_NOT_IN_MODEL = {
    **dict.fromkeys(
        ("data_parallel_size", "nnodes", "node_rank", "master_addr", "master_port"),
        "a fleet has `replicas:`, each on one machine",
    ),
    **dict.fromkeys(("model", "served_model_name"), "the model has `model:` and `name:`"),
    **dict.fromkeys(("lora_modules",), "write `adapters:` in the model"),
}


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Replicas(_Part):
    """How many replicas a model has."""

    min: Annotated[int, Field(ge=0, le=10_000)] = 1
    max: Annotated[int, Field(ge=1, le=10_000)] = 1

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """A number is a fixed number of replicas."""
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        if not isinstance(value, dict | Replicas):
            raise ValueError("expected a number, or min: N and max: N")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, above max {self.max}")
        return self


class Autoscaling(_Part):
    """When replicas start and stop; autoscaling.py explains the fields."""

    ttft_s: Seconds = 1.0
    drain_s: Seconds = 20.0
    lead_s: Seconds = 30.0
    down_delay_s: Seconds = 300.0
    zero_delay_s: Seconds = 600.0


class Updates(_Part):
    """How replicas of a changed model replace the old ones; rollout.py explains the fields."""

    canary: Share | None = None  # None: no canary
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    max_canary_s: Seconds = 3600.0
    significance: Annotated[float, Field(gt=0, lt=1)] = 0.01
    max_latency_ratio: Annotated[float, Field(ge=1, le=100)] = 1.2
    quality: str | None = None  # a file of prompts with answers; None: no quality gate
    max_score_drop: Annotated[float, Field(ge=0, le=100)] = 0.0
    max_surge: Annotated[int, Field(ge=0, le=1000)] = 1
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = 0
    progress_deadline_s: Seconds = 1800.0

    def located(self, folder: Path) -> Updates:
        """The same with a path that does not depend on the current folder."""
        quality = None if self.quality is None else str((folder / self.quality).resolve())
        return self.model_copy(update={"quality": quality})

    def config(self, num_scores: int = 0) -> RolloutConfig:
        """The limits of an update whose quality gate has `num_scores` answers; raises ConfigError."""
        fields = self.model_dump(exclude={"canary", "min_requests", "quality"})
        return RolloutConfig(
            canary_share=self.canary or 1.0,
            min_requests=self.min_requests if self.canary else 0,
            min_scores=num_scores,
            **fields,
        )


class WarmPool(_Part):
    """Idle models of `min: 0` that sleep rather than stop; warm_pool.py explains the fields."""

    memory_gb: Annotated[float, Field(gt=0, le=1e6)]
    idle_s: Seconds = 300.0
    horizon_s: Seconds = 3600.0

    def config(self) -> WarmPoolConfig:
        """All that fits is kept asleep: the least useful models are stopped for others."""
        return WarmPoolConfig(
            memory_bytes=int(self.memory_gb * 2**30),
            idle_s=self.idle_s,
            horizon_s=self.horizon_s,
            min_saved_s=0.0,
        )


class Prices(_Part):
    """Dollars per hour."""

    cpu_hour: Annotated[float, Field(ge=0)] = 0.0  # of one core
    gpu_hour: Annotated[float, Field(ge=0)] = 0.0


class Ingress(_Part):
    """The processes that do HTTP, tokenising and detokenising."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    cpus: Annotated[float, Field(ge=0, le=64)] = 1.0


class Fallback(_Part):
    """A step of a model's chain: another model of the fleet, a shorter answer, or both."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        """A text is the name of a model."""
        return {"model": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _says_something(self) -> Fallback:
        if self.model is None and self.max_tokens is None:
            raise ValueError("expected model: NAME, max_tokens: N, or both")
        return self

    @property
    def step(self) -> FallbackStep:
        return FallbackStep(model=self.model, max_tokens=self.max_tokens)


class Model(_Part):
    """One model of the fleet: a Serve deployment of engines."""

    name: str
    model: str = "default"
    version: str = ""  # a change of it replaces the replicas, for new files at the same path
    options: dict[str, Any] = {}  # of the engine, as `windlass serve` has them
    adapters: dict[str, str] = {}  # folders by name
    replicas: Replicas = Replicas()
    cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0  # of a replica
    gpus: Annotated[float, Field(ge=0, le=1024)] = 0.0  # of a replica
    routing: Routing = "prefix"
    frame_ms: Annotated[float, Field(ge=0, le=1000)] = 20.0  # of tokens that travel together
    autoscaling: Autoscaling = Autoscaling()
    rollout: Updates = Updates()
    fallbacks: Annotated[list[Fallback], Field(max_length=100)] = []  # the chain, in this order

    @cached_property
    def engine(self) -> EngineConfig:
        """The config of a replica's engine; raises ConfigError."""
        options = {name.replace("-", "_"): value for name, value in self.options.items()}
        for name in options.keys() & _NOT_IN_MODEL.keys():
            raise ConfigError(f"options: {name} cannot be set here: {_NOT_IN_MODEL[name]}.")
        if self.adapters:
            modules = tuple(f"{name}={folder}" for name, folder in self.adapters.items())
            options |= {"enable_lora": True, "lora_modules": modules}
        if not self.gpus:  # else each replica would use all cores of its machine
            options.setdefault("num_threads", max(1, int(self.cpus)))
        return EngineConfig.of(model=self.model, served_model_name=(self.name,), **options)

    @property
    def num_ranks(self) -> int:
        return self.engine.parallel.num_ranks

    def check(self) -> None:
        """Raise ConfigError for what the fields do not allow together."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name {self.name!r:.100}: a name has up to 64 letters, digits and ._-"
            )
        ranks, device = self.num_ranks, self.engine.model.device
        if self.gpus and self.gpus != ranks and not (ranks == 1 and self.gpus < 1):
            raise ConfigError(
                f"gpus is {self.gpus:g}, and a replica has {ranks} ranks (tensor_parallel_size x "
                f"pipeline_parallel_size), each with its own GPU. Set gpus: {ranks}."
            )
        if bool(self.gpus) != (device == "cuda") and device != "auto":
            raise ConfigError(
                f"gpus is {self.gpus:g}, and options has device: {device}. Ray hides the GPUs that a "
                "replica has not reserved."
            )
        if self.rollout.quality and not self.rollout.canary:
            raise ConfigError("rollout: quality compares a canary. Set canary, for example 10%.")
        self.rollout.config()
        if self.name in self.adapters:
            raise ConfigError(f"adapters: {self.name!r} is the name of the model itself.")

    def bundles(self) -> list[dict[str, float]]:
        """The placement group of a replica: its ranks are processes of one machine."""
        return [{"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}]

    def targets(self) -> ScalingTargets:
        return ScalingTargets(
            min_replicas=self.replicas.min,
            max_replicas=self.replicas.max,
            **self.autoscaling.model_dump(),
        )


class Fleet(_Part):
    """All models behind one address."""

    name: str = "windlass"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    tenants: str | None = None  # a keys file
    serve: dict[str, Any] = {}  # further options of `windlass serve` about HTTP and the API
    ingress: Ingress = Ingress()
    prices: Prices = Prices()
    warm_pool: WarmPool | None = None
    models: Annotated[list[Model], Field(min_length=1, max_length=1000)]

    def pools(self, model: Model) -> bool:
        """Whether the warm pool may hold a model: its replicas may all stop."""
        return self.warm_pool is not None and not model.replicas.min

    def price_per_hour(self, model: Model) -> float:
        """Of one replica."""
        return model.cpus * self.prices.cpu_hour + model.gpus * self.prices.gpu_hour

    def serve_config(self, model: Model) -> ServeConfig:
        """The server's options for one model; raises ConfigError."""
        options = {name.replace("-", "_"): value for name, value in self.serve.items()}
        for name in options.keys() & _NOT_IN_FLEET.keys():
            raise ConfigError(f"serve: {name} cannot be set here: {_NOT_IN_FLEET[name]}.")
        price = self.price_per_hour(model) or None
        fixed = {"host": self.host, "port": self.port, "keys_file": self.tenants}
        made: ServeConfig = split_options(
            {"serve": ServeConfig},
            {**options, **fixed, "price_per_hour": price, "http_workers": 1, "console": False},
        )["serve"]
        return made

    def located(self, folder: Path) -> Fleet:
        """The same with paths that do not depend on the current folder."""
        models = [
            model.model_copy(
                update={
                    "adapters": {name: str(folder / path) for name, path in model.adapters.items()},
                    "rollout": model.rollout.located(folder),
                }
            )
            for model in self.models
        ]
        tenants = None if self.tenants is None else str((folder / self.tenants).resolve())
        serve = {
            name: [str(folder / str(path)) for path in value]
            if name in _FOLDERS and isinstance(value, list)
            else value
            for name, value in self.serve.items()
        }
        return self.model_copy(update={"models": models, "tenants": tenants, "serve": serve})

    def _check_fallbacks(self, model: Model) -> None:
        others = [each.name for each in self.models if each is not model]
        named = [each.model for each in model.fallbacks if each.model is not None]
        for name in named:
            if name not in others:
                known = ", ".join(others) or "there is no other"
                raise ConfigError(
                    f"model {model.name!r}: fallbacks: {name!r:.100} is not another model of the fleet: "
                    f"{known}."
                )
            if named.count(name) > 1:
                raise ConfigError(f"model {model.name!r}: fallbacks: {name!r} is there twice.")

    def _check_lora_root(self) -> None:
        if not self.serve_config(self.models[0]).lora_root:
            return
        if not any(model.engine.lora.enable_lora for model in self.models):
            raise ConfigError(
                "serve: lora_root does nothing without a model that takes adapters. Write options: "
                "{enable_lora: true} in one."
            )
        if self.ingress.replicas > 1:
            raise ConfigError(
                f"ingress has {self.ingress.replicas} replicas, and each would know other adapters of "
                "serve: lora_root. Set ingress: {replicas: 1}, or write `adapters:` in the model."
            )

    def check(self) -> None:
        """Raise ConfigError for a bad model, option or name."""
        names: set[str] = set()
        for model in self.models:
            try:
                model.check()
                self.serve_config(model)
            except ConfigError as error:
                raise ConfigError(f"model {model.name!r:.100}: {error}") from error
            taken = {model.name, *model.adapters}
            for name in taken & names:
                raise ConfigError(f"two models or adapters of the fleet have the name {name!r}.")
            names |= taken
        for model in self.models:
            self._check_fallbacks(model)
        self._check_lora_root()
        if self.warm_pool is not None and not any(map(self.pools, self.models)):
            raise ConfigError(
                "warm_pool holds models whose replicas may all stop. Set replicas: {min: 0} in one."
            )
        if self.tenants is not None and self.ingress.replicas > 1:
            raise ConfigError(
                f"ingress has {self.ingress.replicas} replicas, and each would count the limits of "
                "`tenants` on its own. Set ingress: {replicas: 1}."
            )


def read_fleet(path: Path) -> Fleet:
    """Read and check a fleet file; raises ConfigError with the place and the reason.

    Relative paths of the tenants' file, of adapters and of lora_root are relative to the file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        document = yaml.load(raw.decode(), StrictLoader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be parsed: {one_line(error)}") from error
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes: not a fleet file.")
    try:
        fleet = _validated(document).located(path.parent)
        fleet.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return fleet


def _validated(document: object) -> Fleet:
    if not isinstance(document, dict):
        raise ConfigError("expected fields such as `models:` and `port:`.")
    try:
        return Fleet.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "extra_forbidden":
            *path, name = first["loc"]
            where = ".".join(map(str, path)) + ": " if path else ""
            raise ConfigError(f"{where}{unknown_field(str(name), _fields_at(path))}") from error
        raise ConfigError(str(validation_error(error))) from error


def _fields_at(path: Sequence[str | int]) -> Iterable[str]:
    """The fields of the part of a fleet at `path`."""
    part: Any = Fleet
    for name in path:
        if isinstance(name, str):
            hint = part.model_fields[name].annotation
            part = next(iter(get_args(hint)), hint)
    return part.model_fields
