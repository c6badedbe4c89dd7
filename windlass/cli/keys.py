"""`windlass keys`: makes a key for the keys file of a server."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from windlass.cli.command import reported
from windlass.cli.flags import log, option, switch
from windlass.config import check_key

_NUM_BYTES = 32


def keys(
    ctx: typer.Context,
    key_id: Annotated[str | None, option("NAME", "Public name of the key.", "--id")] = None,
    expires: Annotated[
        str | None, option("DATE", "When it becomes invalid, such as 2030-01-31.", "--expires")
    ] = None,
    given: Annotated[
        bool, switch("Read an existing key from standard input instead.", "--stdin")
    ] = False,
) -> None:
    """Make a key, and print its line for the file of --keys-file.

    The line goes to standard output, and the key itself, which is stored nowhere, to standard error.
    """
    with reported(ctx):
        import secrets
        from hashlib import sha256

        if given:
            key = sys.stdin.readline().strip()
            check_key(key, "the key on standard input")
        else:
            key = f"wl-{secrets.token_urlsafe(_NUM_BYTES)}"
            log(f"key, shown only now: {key}")
        fields = {"id": key_id, "sha256": sha256(key.encode()).hexdigest(), "expires": expires}
        listed = [f"{name}: {value}" for name, value in fields.items() if value is not None]
        typer.echo("- {" + ", ".join(listed) + "}")
