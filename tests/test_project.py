"""The rules of the house: who may import whom, sizes, and what must stay fast."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli.main import app
from windlass.config import (
    CacheConfig,
    GateConfig,
    GrammarConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    ServeConfig,
    SpecConfig,
    flag,
)

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "windlass").rglob("*.py"))
ALL_FILES = PACKAGE + sorted((ROOT / "tests").rglob("*.py"))

# What a room may import directly; what those may import comes with it.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "child_process": set(),
    "folders": {"errors"},
    "pages": {"errors"},
    "settings": {"errors"},
    "speculative_config": {"settings"},
    "lora_config": {"settings"},
    "config": {"lora_config", "speculative_config"},
    "core": {"config"},
    "engine": {"core"},
    "text": {"core", "child_process"},
    "serve": {"engine", "pages", "text"},
    "kernels": {"config", "folders"},
    "parallel": {"config"},
    "quant": {"kernels"},
    "layers": {"quant", "parallel"},
    "models": {"layers"},
    "lora": {"models"},
    "runner": {"lora", "pages", "text"},
    "speculative": {"runner"},
    "build": {"serve", "speculative"},
    "outputs": {"text"},
    "llm": {"build", "outputs"},
    "tools": {"llm"},
    "cli": {"tools"},
}
# The computing side knows the deciding one only by these: plain values.
TYPES = {"windlass.core." + name for name in ("card", "sampling", "tokenizer", "types")}
# Of text/, the computing side uses the matcher that follows one request's grammar.
MATCHER = "windlass.text.grammar.matcher"
COMPUTING = {"kernels", "parallel", "quant", "layers", "models", "lora", "runner", "speculative"}


def room_of(module: str) -> str:
    """windlass.core.types -> core; the package itself is a room of names, above all others."""
    return module.split(".")[1] if "." in module else "windlass"


@cache
def reachable(room: str) -> frozenset[str]:
    return frozenset({room}).union(*(reachable(below) for below in BELOW[room]))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, in functions and for type checking too."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from windlass.models import spm` imports a module, `from x import name` one of x.
            yield from (name if _is_module(name) else node.module for name in names)


def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_no_import_goes_up() -> None:
    wrong = []
    for path in PACKAGE:
        own = module_name(path)
        if own == "windlass":
            continue
        for other in imports(path):
            if not other.startswith("windlass.") and other != "windlass":
                continue
            if other == "windlass":
                allowed = room_of(own) == "cli"  # for its version
            elif room_of(own) in COMPUTING and room_of(other) == "core":
                allowed = other in TYPES
            elif room_of(own) in COMPUTING and room_of(other) == "text":
                allowed = other == MATCHER
            else:
                allowed = room_of(other) in reachable(room_of(own))
            if not allowed:
                wrong.append(f"{own} imports {other}")
    assert wrong == []


def test_every_room_has_its_place() -> None:
    found = {room_of(module_name(path)) for path in PACKAGE} - {"windlass"}
    assert found <= set(BELOW)


_REFUSE_TORCH = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is refused here")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_deciding_side_runs_without_torch() -> None:
    rooms = {"errors", "settings", "speculative_config", "lora_config", "config"}
    rooms |= {"child_process", "core", "engine", "serve", "text"}
    names = [module_name(path) for path in PACKAGE]
    chosen = [name for name in names if room_of(name) in rooms]
    chosen += ["windlass", "windlass.build", "windlass.llm", "windlass.cli.main"]
    command = [sys.executable, "-c", _REFUSE_TORCH, *chosen]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


_HEAVY = {
    "fastapi",
    "gguf",
    "llguidance",
    "numpy",
    "pydantic",
    "rich",
    "torch",
    "transformers",
    "triton",
    "uvicorn",
}


@pytest.mark.parametrize(
    ("statement", "max_modules"),
    [("import windlass", 30), ("import windlass.cli.main", 200)],
)
def test_starting_imports_little(statement: str, max_modules: int) -> None:
    """Start-up time is the number of modules imported, which a busy machine does not change."""
    program = (
        f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {name.split(".")[0] for name in loaded} & _HEAVY == set()
    assert len(loaded) <= max_modules


def test_functions_are_short() -> None:
    long = []
    for path in ALL_FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                if length > 80:
                    long.append(f"{path.name}: {node.name} has {length} lines")
    assert long == []


def test_every_file_says_what_it_is_for() -> None:
    assert [str(path) for path in PACKAGE if ast.get_docstring(parse(path)) is None] == []


def test_public_names_are_sorted() -> None:
    import windlass

    assert windlass.__all__ == sorted(windlass.__all__)
    for path in PACKAGE:
        for node in parse(path).body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
                continue
            if "__all__" in [t.id for t in node.targets if isinstance(t, ast.Name)]:
                listed = ast.literal_eval(node.value)
                assert listed == sorted(listed), path


def test_nothing_unpickles() -> None:
    for path in PACKAGE:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                assert called not in ("torch.load", "np.load", "numpy.load"), path
        modules = {name.split(".")[0] for name in imports(path)}
        assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}, path


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    listed = list(project["dependencies"])
    listed += [name for extra in ("cuda", "eval", "report", "tune") for name in extras[extra]]
    declared = {re.split(r"[\s<>=;\[]", item)[0].lower() for item in listed}
    named_otherwise = {
        "lm_eval": "lm-eval",
        "pydantic_core": "pydantic",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
    }
    for path in PACKAGE:
        for name in imports(path):
            top = name.split(".")[0]
            if top != "windlass" and top not in sys.stdlib_module_names:
                assert named_otherwise.get(top, top).lower() in declared, f"{path}: {top}"


def test_every_flag_of_serve_is_a_setting() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    lines = re.findall(r"^  (-.+?)(?:  |$)", shown, flags=re.MULTILINE)
    flags = {name for line in lines for name in re.findall(r"--[a-z][a-z-]*", line)}
    expected = {"--config", "--help"}
    sections = (ModelConfig, CacheConfig, SchedulerConfig, SpecConfig, LoraConfig)
    for section in (*sections, GrammarConfig, ServeConfig, GateConfig):
        for item in fields(section):
            long = [name for name in item.metadata["flags"] if name.startswith("--")]
            names = [flag(item.name), *long]
            expected.update(names)
            if item.type == "bool":
                expected.update(f"--no-{name.removeprefix('--')}" for name in names)
    assert flags == expected - {"--model"}
