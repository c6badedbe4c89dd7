"""Commands that query a running server: `windlass explain`, `windlass memory` and `windlass usage`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from windlass.cli.command import PanelCommand, reported
from windlass.cli.flags import option, switch
from windlass.cli.secrets import API_KEY_VARIABLE
from windlass.errors import ConfigError, EngineError, RequestError

_TIMEOUT_S = 30.0

Url = Annotated[str, option("URL", "URL of the server.", "--url")]
Key = Annotated[
    str | None,
    option(
        "KEY",
        "API key of the server; better in the environment.",
        "--api-key",
        "--key",
        envvar=API_KEY_VARIABLE,
    ),
]
AsJson = Annotated[bool, switch("Print JSON.", "--json")]
_URL = "http://127.0.0.1:8000"


def add_to(app: typer.Typer) -> None:
    app.command("explain", cls=PanelCommand)(explain)
    app.command("memory", cls=PanelCommand)(memory)
    app.command("usage", cls=PanelCommand)(usage)


def explain(
    ctx: typer.Context,
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="Field `id` of a response, or X-Request-Id.")
    ],
    url: Url = _URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Explain the latency of a request: its timeline, one sentence, and a setting that helps."""
    with reported(ctx):
        from urllib.parse import quote

        explanation = fetch(url, f"/v1/requests/{quote(request_id, safe='')}/explain", api_key)
        if as_json:
            typer.echo(json.dumps(explanation, indent=2))
            return
        from windlass.cli.remote_tables import print_explanation

        print_explanation(explanation)


def memory(
    ctx: typer.Context, url: Url = _URL, api_key: Key = None, as_json: AsJson = False
) -> None:
    """Show the memory use of a running server."""
    with reported(ctx):
        report = fetch(url, "/memory", api_key)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
            return
        from windlass.cli.remote_tables import print_memory

        print_memory(report)


def usage(
    ctx: typer.Context,
    url: Url = _URL,
    api_key: Key = None,
    since: Annotated[
        str | None, option("DATE", "Start, such as 2030-01-31; default: 31 days ago.", "--since")
    ] = None,
    bucket: Annotated[str, option("BUCKET", "hour, day or month.", "--bucket")] = "day",
    every: Annotated[bool, switch("All tenants; needs an admin key.", "--all")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the usage of a key's tenant, or of all tenants."""
    with reported(ctx):
        from urllib.parse import urlencode

        query = urlencode({"bucket": bucket, **({} if since is None else {"since": since})})
        report = fetch(url, f"/{'admin' if every else 'v1'}/usage?{query}", api_key)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
            return
        from windlass.cli.remote_tables import print_usage

        print_usage(report)


def fetch(url: str, path: str, key: str | None) -> dict[str, Any]:
    """GET a JSON object from the server. Errors state what to do."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import urlsplit
    from urllib.request import Request, urlopen

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {url!r}: expected for example {_URL}.")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    full_url = url.rstrip("/").removesuffix("/v1") + path
    try:
        with urlopen(Request(full_url, headers=headers), timeout=_TIMEOUT_S) as response:
            content = json.load(response)
    except HTTPError as error:
        raise _http_error(error.code, error.read()) from error
    except (OSError, HTTPException) as error:
        raise EngineError(f"no server responds at {url}: {error}. Is it running?") from error
    except ValueError as error:
        raise EngineError(f"{full_url} did not return JSON: {error}.") from error
    if not isinstance(content, dict):
        raise EngineError(f"{full_url} did not return a JSON object; is it a Windlass server?")
    return content


def _http_error(status: int, body: bytes) -> EngineError:
    """An error with the server's message, if the body has one."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the server returned status {status}."
    if status == 401:
        message += " Give the key with --api-key or $WINDLASS_API_KEY."
    return RequestError(message) if status < 500 else EngineError(message)
