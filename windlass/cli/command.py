"""Shared by all commands: generated flags, `--config`, help by section, error reports.

A command is a function that takes `Options` and its own typer parameters, and returns an exit code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from windlass.cli.config_file import read_config
from windlass.cli.flags import log
from windlass.cli.foreign import flags_of, translate
from windlass.cli.options import (
    ENGINE_OPTIONS,
    GATE_OPTIONS,
    GRAMMAR_OPTIONS,
    LORA_OPTIONS,
    MODEL_ARGUMENT,
    PARALLEL_OPTIONS,
    SERVE_OPTIONS,
    Option,
)
from windlass.cli.secrets import hide_secrets
from windlass.config import EngineConfig, GateConfig, ServeConfig, split_options
from windlass.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    EngineError,
    RequestError,
    UnsupportedError,
)

# Errors that the user can fix; all others are failures of Windlass or of the machine.
_NOTES = "windlass.notes"  # key of click's meta

_USER_ERRORS = (ConfigError, RequestError, CheckpointError, UnsupportedError, DownloadError)


@dataclass(frozen=True, slots=True)
class Options:
    """Values set by flags or the config file. Options that are not set are absent."""

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()  # lines for the log about flags of other engines
    sources: Mapping[str, str] = field(default_factory=dict)  # of each value: flag or file

    @property
    def model(self) -> str:
        return str(self.values.get("model", MODEL_ARGUMENT.default))

    def only(self, options: Sequence[Option]) -> dict[str, Any]:
        names = {option.name for option in options}
        return {name: value for name, value in self.values.items() if name in names}

    def engine_values(self) -> dict[str, Any]:
        """Engine options as keyword arguments of `LLM`."""
        engine = [*ENGINE_OPTIONS, *LORA_OPTIONS, *GRAMMAR_OPTIONS, *PARALLEL_OPTIONS]
        return self.only([MODEL_ARGUMENT, *engine])

    def engine(self) -> EngineConfig:
        return EngineConfig.of(**self.engine_values())

    def serve(self) -> ServeConfig:
        made: ServeConfig = split_options({"serve": ServeConfig}, self.only(SERVE_OPTIONS))["serve"]
        return made

    def gate(self) -> GateConfig:
        made: GateConfig = split_options({"gate": GateConfig}, self.only(GATE_OPTIONS))["gate"]
        return made


class CommandGroup(TyperGroup):
    """Lists commands with their whole first sentences, by section if there are sections."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for title, names in (self.sections or {"Commands": list(self.commands)}).items():
            with formatter.section(title):
                formatter.write_dl([(name, self._summary(name)) for name in names])

    def _summary(self, name: str) -> str:
        first = inspect.cleandoc(self.commands[name].help or "").partition("\n\n")[0]
        return first.replace("\n", " ")


class PanelCommand(TyperCommand):
    """Help in sections, with whole option names. Removes keys from the process list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        hide_secrets(ctx.params)
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = getattr(param, "rich_help_panel", None) or "Command"
                panels.setdefault(title, []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


class ModelCommand(PanelCommand):
    """A command with a model, which also takes flags of other engines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with reported(ctx):
            args, ctx.meta[_NOTES] = translate(args, flags_of(self.get_params(ctx)))
        return super().parse_args(ctx, args)


def register(
    app: typer.Typer, function: Callable[..., int], generated: Sequence[Option], **settings: Any
) -> None:
    """Add `function` to `app` as a command with a model argument, `--config` and generated flags."""
    of_server = "log_format" in {option.name for option in generated}
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    def run(ctx: typer.Context, **values: Any) -> None:
        arguments = {parameter.name: values.pop(parameter.name) for parameter in own}
        with reported(ctx):
            options = _merged(values, generated, ctx.meta[_NOTES])
            if not of_server:
                for note in options.notes:  # a server logs them itself
                    log(note)
            code = function(options, **arguments)
        raise typer.Exit(code)

    context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.Signature(
        [
            context,
            _model_argument(),
            *keyword_only,
            _config_flag(),
            *(option.parameter(of_server) for option in generated),
        ]
    )
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in signature.parameters.values()}
    name = function.__name__.replace("_", "-")
    app.command(name, cls=ModelCommand, help=function.__doc__, **settings)(run)


def _merged(values: dict[str, Any], generated: Sequence[Option], notes: Sequence[str]) -> Options:
    """Merge flags over the config file; omit options that neither sets."""
    path = values.pop("config_file")
    from_file: dict[str, Any] = {}
    if path is not None:
        lines = list(notes)
        from_file = read_config(path, [MODEL_ARGUMENT, *generated], on_note=lines.append)
        notes = lines
    # An absent list is None or empty, depending on the version of typer.
    given = {name: value for name, value in values.items() if value is not None and value != []}
    sources = {**dict.fromkeys(from_file, "file"), **dict.fromkeys(given, "flag")}
    return Options({**from_file, **given}, tuple(notes), sources)


def _model_argument() -> inspect.Parameter:
    info = typer.Argument(
        None, metavar="MODEL", help=f"{MODEL_ARGUMENT.help} [default: {MODEL_ARGUMENT.default}]"
    )
    return inspect.Parameter(
        "model", inspect.Parameter.KEYWORD_ONLY, default=info, annotation=str | None
    )


def _config_flag() -> inspect.Parameter:
    info = typer.Option(
        None,
        "--config",
        metavar="FILE",
        help="YAML file with flag names as keys; flags take precedence.",
    )
    return inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=info, annotation=Path | None
    )


@contextmanager
def reported(ctx: typer.Context) -> Iterator[None]:
    """Report an error as a paragraph on stderr and an exit code; with --traceback, re-raise it."""
    try:
        yield
    except EngineError as error:
        if ctx.find_root().params.get("traceback"):
            raise
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(2 if isinstance(error, _USER_ERRORS) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
