"""`windlass compile`: fills the caches of compiled kernels, so that a later start finds them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from windlass.cli.command import Options
from windlass.cli.flags import switch


def compile(
    options: Options, as_json: Annotated[bool, switch("Print JSON.", "--json")] = False
) -> int:
    """Compile the kernels that an engine with these options needs, and exit.

    For images and volumes: a later start with the same options finds them in the cache. On a CPU these
    are the kernels of this machine's CPU, which all models share. With a GPU an engine is built, whose
    kernels are then in Triton's cache; --load-format dummy needs no weights for it.
    """
    config = options.engine()
    from windlass.tools.compile import fill_caches

    filled = fill_caches(config)
    if as_json:
        typer.echo(json.dumps([{**asdict(each), "where": str(each.where)} for each in filled]))
        return 0
    for each in filled:
        done = f"{each.what}: {each.how} in {each.seconds:.1f} s, {each.where}"
        typer.echo(f"{done}; device: {each.device}")
    return 0
