"""Commands that ask a running server: `windlass explain` and `windlass memory`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from windlass.cli.command import PanelCommand, reported
from windlass.cli.flags import option, switch
from windlass.errors import ConfigError, EngineError, RequestError

_TIMEOUT_S = 30.0

Url = Annotated[str, option("URL", "Where the server listens.", "--url")]
Key = Annotated[str | None, option("KEY", "The server's key.", "--key", envvar="WINDLASS_API_KEY")]
AsJson = Annotated[bool, switch("Print JSON.", "--json")]
_URL = "http://127.0.0.1:8000"


def add_to(app: typer.Typer) -> None:
    app.command("explain", cls=PanelCommand)(explain)
    app.command("memory", cls=PanelCommand)(memory)


def explain(
    ctx: typer.Context,
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="The field `id` of an answer, or X-Request-Id.")
    ],
    url: Url = _URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request took as long as it did: its timeline, one sentence, and a setting."""
    with reported(ctx):
        from urllib.parse import quote

        told = fetch(url, f"/v1/requests/{quote(request_id, safe='')}/explain", key)
        if as_json:
            typer.echo(json.dumps(told, indent=2))
            return
        from windlass.cli.remote_tables import print_explanation

        print_explanation(told)


def memory(ctx: typer.Context, url: Url = _URL, key: Key = None, as_json: AsJson = False) -> None:
    """Show what a running server's memory is used for."""
    with reported(ctx):
        told = fetch(url, "/memory", key)
        if as_json:
            typer.echo(json.dumps(told, indent=2))
            return
        from windlass.cli.remote_tables import print_memory

        print_memory(told)


def fetch(url: str, path: str, key: str | None) -> dict[str, Any]:
    """What a server answers to a GET, or an error that says what to do."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlsplit
    from urllib.request import Request, urlopen

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {url!r}: expected such as {_URL}.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    where = url.rstrip("/").removesuffix("/v1") + path
    try:
        with urlopen(Request(where, headers=headers), timeout=_TIMEOUT_S) as answer:
            read = json.load(answer)
    except HTTPError as error:
        raise _refusal(error.code, error.read()) from error
    except (OSError, HTTPException) as error:
        raise EngineError(f"no server answers at {url}: {error}. Is it running?") from error
    except ValueError as error:
        raise EngineError(f"{where} does not answer with JSON: {error}.") from error
    if not isinstance(read, dict):
        raise EngineError(f"{where} is not a Windlass server's.")
    return read


def _refusal(status: int, body: bytes) -> EngineError:
    """The server's own words, where it has any."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {status}."
    if status == 401:
        message += " Give it with --key or WINDLASS_API_KEY."
    return RequestError(message) if status < 500 else EngineError(message)
