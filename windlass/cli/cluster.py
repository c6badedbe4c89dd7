"""`windlass cluster`: a fleet of models on Ray Serve."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli.command import CommandGroup, PanelCommand, reported
from windlass.cli.flags import log, option, switch
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.cluster.plan import ModelPlan

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a fleet of models on Ray Serve.",
)

FleetFile = Annotated[Path, typer.Argument(metavar="FILE", help="The fleet file, in YAML.")]
Address = Annotated[
    str, option("ADDRESS", "Ray cluster to use; auto: the one of this machine.", "--address")
]
AsJson = Annotated[bool, switch("Print JSON.", "--json")]


@app.command("up", cls=PanelCommand)
def up(
    ctx: typer.Context,
    file: FleetFile,
    address: Address = "auto",
    local: Annotated[
        bool, switch("Run Ray in this process, until Ctrl-C, for trying a fleet out.", "--local")
    ] = False,
) -> None:
    """Start a fleet, or change a running one to the file, and wait until it answers."""
    with reported(ctx):
        from windlass.cluster.fleet import read_fleet
        from windlass.cluster.plan import check_files

        fleet = read_fleet(file)
        check_files(fleet)
        deploy = _deploy()
        if local:
            deploy.start_local(fleet)
        else:
            deploy.connect(address)
        log(f"starting {', '.join(model.name for model in fleet.models)}")
        typer.echo(f"\nWindlass serves at {deploy.up(fleet, on_progress=log)}\n")
        if local:
            deploy.wait_for_interrupt()


@app.command("status", cls=PanelCommand)
def status(ctx: typer.Context, address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the fleets of a Ray cluster, with the state of each model's replicas."""
    with reported(ctx):
        deploy = _deploy()
        deploy.connect(address)
        found = deploy.status()
        typer.echo(json.dumps(found, indent=2) if as_json else _status_text(found))


@app.command("down", cls=PanelCommand)
def down(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The fleet's `name`.")] = "windlass",
    address: Address = "auto",
) -> None:
    """End a fleet: its requests may finish first."""
    with reported(ctx):
        deploy = _deploy()
        deploy.connect(address)
        deploy.down(name)


@app.command("plan", cls=PanelCommand)
def plan(
    ctx: typer.Context,
    file: FleetFile,
    context: Annotated[
        int | None, option("N", "Tokens per request [default: 4096, or the model's].", "--context")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a fleet would start, with memory and cost per hour, without starting anything."""
    with reported(ctx):
        from windlass.cluster.fleet import read_fleet
        from windlass.cluster.plan import check_files, plan_model

        fleet = read_fleet(file)
        check_files(fleet)
        plans = [plan_model(fleet, model, context) for model in fleet.models]
        if as_json:
            typer.echo(json.dumps([asdict(each) for each in plans], indent=2))
        else:
            typer.echo("\n\n".join(map(_plan_text, plans)))
            low, high = (sum(getattr(each, name) for each in plans) for name in _PER_HOUR)
            typer.echo(f"\nall models: ${low:,.2f} to ${high:,.2f} per hour")


_PER_HOUR = ("min_per_hour", "max_per_hour")


def _deploy() -> Any:
    try:
        from windlass.cluster import deploy
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "ray":
            raise ConfigError(
                "windlass cluster needs Ray. Install it with: pip install 'windlass-llm[cluster]'"
            ) from error
        raise
    return deploy


def _plan_text(plan: ModelPlan) -> str:
    devices = f"{plan.cpus:g} CPUs" + (f" and {plan.gpus:g} GPUs" if plan.gpus else "")
    return (
        f"{plan.name}: {plan.model}\n"
        f"  replicas    {plan.min_replicas} to {plan.max_replicas}, each with {devices} in "
        f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}\n"
        f"  memory      {plan.total_bytes / 2**30:.2f} GiB per replica: "
        f"{plan.weight_bytes / 2**30:.2f} GiB of weights, the rest for {plan.concurrency} requests of "
        f"{plan.context:,} tokens\n"
        f"  cost        ${plan.min_per_hour:,.2f} to ${plan.max_per_hour:,.2f} per hour"
    )


def _status_text(found: dict[str, Any]) -> str:
    lines = []
    for name, fleet in found.items():
        lines.append(f"{name}: {fleet['status']} {fleet['message']}".rstrip())
        for each, model in fleet["models"].items():
            lines.append(f"  {each}: {_model_text(model)}")
        for each, item in fleet["deployments"].items():
            counts = ", ".join(f"{count} {state}" for state, count in item["replicas"].items())
            lines.append(f"  {each:<24} {item['status']:<12} {counts} {item['message']}".rstrip())
    return "\n".join(lines) or "no fleet runs here."


def _model_text(model: dict[str, Any]) -> str:
    text = f"version {model['version']}"
    if model["next"] is not None:
        text += (
            f", {model['phase']} to version {model['next']}, {model['share']:.0%} of the requests"
        )
    if model["asleep"]:
        text += f", {model['asleep']} asleep"
    return f"{text}; {model['reason']}" if model["reason"] else text
