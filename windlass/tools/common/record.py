"""A benchmark's result with everything needed to repeat it: command, commit, hardware, versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windlass.config import flag
from windlass.errors import ConfigError

_PACKAGES = ("windlass", "torch", "triton", "transformers", "numpy")
# Never written to a file, whatever else a run was given.
_SECRETS = ("hf_token", "api_key", "header")


@dataclass(frozen=True, slots=True)
class Record:
    """One benchmark, as it is written to a file. `rows` are the table, `notes` say how to read it."""

    name: str
    rows: list[dict[str, Any]]
    notes: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = field(default_factory=lambda: _command())
    commit: str = field(default_factory=lambda: _commit())
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d"))
    hardware: str = field(default_factory=lambda: hardware())
    versions: dict[str, str] = field(default_factory=lambda: _versions())

    def save(self, path: Path) -> None:
        """Write it whole or not at all, without secrets."""
        values = asdict(self)
        values["settings"] = {
            key: value for key, value in self.settings.items() if key not in _SECRETS
        }
        save_text(path, json.dumps(values, indent=2, default=str) + "\n")

    @property
    def origin(self) -> str:
        """The commit, date, machine and versions, as a sentence goes on after the command."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"at {self.commit} on {self.date}; {self.hardware}; {versions}."


def save_text(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_record(path: Path) -> Record:
    """What an earlier run has written."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is no benchmark's result: {error}.") from error


def rows_before(path: Path, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that an earlier run of the same benchmark and settings has left in a file, if any."""
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before, found = record["settings"], record["name"]
        rows: list[dict[str, Any]] = record["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"-o {path}: exists, and is no benchmark's result: {error!r}.") from error
    other = [key for key in before | settings if before.get(key) != settings.get(key)]
    if found != name or other:
        what = f"{', '.join(other)} differ" if found == name else f"it is of {found!r}"
        raise ConfigError(
            f"-o {path}: holds results of another run ({what}). Remove it, or choose another file."
        )
    return rows


def _command() -> str:
    words = [Path(sys.argv[0]).name]
    secret_follows = False
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        secret = name in map(flag, _SECRETS)
        shown = f"{name}=***" if secret and equals else word
        words.append("***" if secret_follows else shown)
        secret_follows = secret and not equals
    return shlex.join(words)


def _commit() -> str:
    """The commit this code is from, "+" when files have changed since; "unknown" outside git."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "."], cwd=here.parent.parent, check=False
        ).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def hardware() -> str:
    """The machine, in words."""
    return f"{_cpu_name()}, {os.cpu_count()} cores{_gpu_name()}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        fields = dict(
            line.split(":", 1) for line in info.read_text().splitlines() if line.count(":") == 1
        )
        names = {key.strip(): value.strip() for key, value in fields.items()}
        if "model name" in names:
            return names["model name"]
        if names.get("CPU part") == "0xd0c":
            return "Arm Neoverse-N1"
    return platform.processor() or platform.machine()


def _gpu_name() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return f", {torch.cuda.get_device_name()}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
