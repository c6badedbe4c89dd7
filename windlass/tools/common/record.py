"""Benchmark results, with the command, commit, hardware and versions to repeat them."""

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
# Options that are never written to a file.
_SECRETS = ("hf_token", "api_key", "cluster_secret", "header")


@dataclass(frozen=True, slots=True)
class Record:
    """One stored benchmark: `rows` are the table, `notes` explain it."""

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
        """Write the record atomically, without secrets."""
        values = asdict(self)
        values["settings"] = {
            key: value for key, value in self.settings.items() if key not in _SECRETS
        }
        save_text(path, json.dumps(values, indent=2, default=str) + "\n")

    @property
    def origin(self) -> str:
        """Commit, date, machine and versions: the rest of a sentence that begins with the command."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"at {self.commit} on {self.date}; {self.hardware}; {versions}."


def save_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_record(path: Path) -> Record:
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is not a benchmark result: {error}.") from error


def saved_rows(path: Path, name: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that an earlier run of the same benchmark with the same settings saved to a file."""
    if not path.is_file():
        return []
    record = read_record(path)
    before = record.settings
    changed = [key for key in before | settings if before.get(key) != settings.get(key)]
    if record.name != name or changed:
        what = (
            f"benchmark {record.name!r}" if record.name != name else f"{', '.join(changed)} differ"
        )
        raise ConfigError(
            f"-o {path}: has results of another run ({what}). Remove it, or choose another file."
        )
    return record.rows


def _command() -> str:
    name = Path(sys.argv[0]).name
    words = ["windlass" if name == "__main__.py" else name]  # python -m windlass.cli
    secret_follows = False
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        secret = name in map(flag, _SECRETS)
        shown = f"{name}=***" if secret and equals else word
        words.append("***" if secret_follows else shown)
        secret_follows = secret and not equals
    return shlex.join(words)


def _commit() -> str:
    """The commit of this checkout, with "+" after local changes; "unknown" outside git."""
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
    return f"{cpu_name()}, {os.cpu_count()} cores{_gpu_name()}"


def cpu_name() -> str:
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
