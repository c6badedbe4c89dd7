"""`windlass balance-experts`: a placement of experts on ranks from recorded load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.command import reported
from windlass.cli.flags import log, option, switch
from windlass.cli.results import check_path
from windlass.errors import ConfigError


def balance_experts(
    ctx: typer.Context,
    load: Annotated[
        str, typer.Argument(metavar="LOAD", help="File that --record-expert-load wrote.")
    ],
    output: Annotated[
        Path, option("FILE", "Placement to write, for --expert-placement.", "-o", "--output")
    ],
    ranks: Annotated[int, option("N", "Number of devices.", "--tensor-parallel-size", "-tp")],
    as_json: Annotated[bool, switch("Print JSON.", "--json")] = False,
) -> None:
    """Place experts on devices so that each gets about as many tokens.

    Prints for each layer the tokens of the busiest device over the mean of the devices, with the
    default placement and with the new one.
    """
    with reported(ctx):
        from windlass.core.expert_load import read_load, write_placements

        if ranks < 2:
            raise ConfigError(f"--tensor-parallel-size must be at least 2, got {ranks}.")
        check_path("--output", output)
        recorded = read_load(load)
        if not recorded.num_tokens:
            raise ConfigError(f"{load}: no token was counted. Record the load of some requests.")
        placements = recorded.balanced(ranks)
        before = recorded.imbalance(recorded.spread(ranks))
        after = recorded.imbalance(placements)
        write_placements(str(output), placements)
        log(f"written to {output}")
        if as_json:
            rows = {layer: {"before": before[layer], "after": after[layer]} for layer in before}
            typer.echo(json.dumps(rows, indent=2))
            return
        typer.echo("layer  before  after")
        for layer in before:
            typer.echo(f"{layer:>5}  {before[layer]:>6.2f}  {after[layer]:>5.2f}")
        worst = max(before.values()), max(after.values())
        typer.echo(f"worst  {worst[0]:>6.2f}  {worst[1]:>5.2f}")
