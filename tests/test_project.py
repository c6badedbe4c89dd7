"""Rules of the project: import layers, function lengths, start-up time."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import TopologicalSorter
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
    ParallelConfig,
    SchedulerConfig,
    ServeConfig,
    SpecConfig,
    flag,
)

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "windlass").rglob("*.py"))
ALL_FILES = PACKAGE + sorted((ROOT / "tests").rglob("*.py"))

# Direct imports that a package may have; indirect imports follow from them.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "start_log": set(),
    "child_process": set(),
    "sockets": set(),
    "garbage": set(),
    "folders": {"errors"},
    "measurement_cache": {"folders"},
    "machine": {"errors"},
    "pages": {"errors"},
    "settings": {"errors"},
    "speculative_config": {"settings"},
    "lora_config": {"settings"},
    "parallel_config": {"settings"},
    "handshake": {"parallel_config", "sockets"},
    "serve_config": {"settings"},
    "config": {"lora_config", "parallel_config", "serve_config", "speculative_config"},
    "core": {"config"},
    "engine": {"core"},
    "tiers": {"core", "folders", "handshake", "machine"},
    "text": {"core", "child_process", "machine"},
    "serve": {"engine", "garbage", "pages", "text", "tiers"},
    "kernels": {"config", "machine", "measurement_cache", "start_log"},
    "parallel": {"config", "child_process", "handshake", "machine"},
    "quant": {"kernels"},
    "layers": {"quant", "parallel"},
    "models": {"layers"},
    "lora": {"models"},
    "runner": {"lora", "pages", "text", "tiers"},
    "speculative": {"runner"},
    "build_peers": {"engine", "runner"},
    "build_rank": {"build_peers", "garbage", "speculative"},
    "build": {"build_rank"},
    "build_scorer": {"build_rank"},
    "start": {"build", "serve"},
    "outputs": {"text"},
    "llm_requests": {"outputs", "serve"},
    "llm": {"build", "llm_requests"},
    "async_llm": {"start", "llm_requests"},
    "tools": {"llm", "async_llm", "build_scorer"},
    "cluster": {"tools"},
    "cli": {"cluster"},
    "__main__": {"cli"},
}
# The runner's side imports only plain values from core.
TYPES = {
    f"windlass.core.{name}"
    for name in (
        "card",
        "expert_load",
        "kv_layout",
        "mla",
        "moe",
        "pooling",
        "recurrent",
        "sampling",
        "tokenizer",
        "types",
    )
}
TYPES |= {"windlass.core.speculation." + name for name in ("costs", "facts")}
# Of text/, the computing side uses the matcher that follows one request's grammar.
MATCHER = "windlass.text.grammar.matcher"
COMPUTING = {"kernels", "parallel", "quant", "layers", "models", "lora", "runner", "speculative"}


def package_of(module: str) -> str:
    """windlass.core.types -> core; the top-level package imports from all others."""
    return module.split(".")[1] if "." in module else "windlass"


@cache
def reachable(package: str) -> frozenset[str]:
    return frozenset({package}).union(*(reachable(below) for below in BELOW[package]))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    """Free the parsed files, which are hundreds of MB, after the last test."""
    yield
    parse.cache_clear()


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, including in functions and for type checking."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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


def test_imports_follow_the_layers() -> None:
    wrong = []
    for path in PACKAGE:
        own = module_name(path)
        if own == "windlass":
            continue
        for other in imports(path):
            if not other.startswith("windlass.") and other != "windlass":
                continue
            if other == "windlass.version":
                allowed = True
            elif package_of(own) in COMPUTING and package_of(other) == "core":
                allowed = other in TYPES
            elif package_of(own) in COMPUTING and package_of(other) == "text":
                allowed = other == MATCHER
            else:
                allowed = package_of(other) in reachable(package_of(own))
            if not allowed:
                wrong.append(f"{own} imports {other}")
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    """Raises CycleError with the circle. Imports in functions and for type checking count, too."""
    TopologicalSorter(
        {
            module_name(path): {name for name in imports(path) if name.startswith("windlass.")}
            for path in PACKAGE
        }
    ).prepare()


def test_every_package_has_a_layer() -> None:
    found = {package_of(module_name(path)) for path in PACKAGE} - {"windlass"}
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


def test_scheduler_and_server_import_without_torch() -> None:
    packages = {"errors", "settings", "speculative_config", "lora_config", "config"}
    packages |= {"parallel_config"}
    packages |= {"child_process", "core", "engine", "machine", "serve", "text", "tiers"}
    names = [module_name(path) for path in PACKAGE]
    chosen = [name for name in names if package_of(name) in packages]
    chosen += ["windlass", "windlass.build", "windlass.llm", "windlass.cli.main"]
    chosen += [name for name in names if name.startswith("windlass.tools.doctor")]
    if importlib.util.find_spec("opentelemetry") is None:
        chosen.remove("windlass.serve.otel")
    command = [sys.executable, "-c", _REFUSE_TORCH, *chosen]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_engine_imports_without_the_servers_dependencies() -> None:
    program = (
        "import sys\n"
        "for name in ('fastapi', 'gguf', 'llguidance', 'msgspec', 'pydantic', 'uvicorn', 'zmq'):\n"
        "    sys.modules[name] = None\n"
        "import windlass.build, windlass.runner.assemble, windlass.tools.bench.throughput\n"
        "import windlass.runner.expert_load, windlass.runner.cuda.executors\n"
        "slow = {'torch._dynamo', 'torch._inductor', 'transformers', 'sympy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
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
def test_start_up_imports_few_modules(statement: str, max_modules: int) -> None:
    """The number of imported modules stands for start-up time, which depends on the load of the machine."""
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


def test_every_file_has_a_docstring() -> None:
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


def test_no_code_unpickles() -> None:
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
    listed += [
        name
        for extra in ("cluster", "cuda", "eval", "otel", "report", "transformers", "tune")
        for name in extras[extra]
    ]
    declared = {re.split(r"[\s<>=;\[]", item)[0].lower() for item in listed}
    named_otherwise = {
        "lm_eval": "lm-eval",
        "opentelemetry": "opentelemetry-sdk",
        "pydantic_core": "pydantic",
        "yaml": "pyyaml",
        "zmq": "pyzmq",
    }
    for path in PACKAGE:
        for name in imports(path):
            top = name.split(".")[0]
            if top != "windlass" and top not in sys.stdlib_module_names:
                assert named_otherwise.get(top, top).lower() in declared, f"{path}: {top}"


def test_texts_name_the_distribution_on_the_package_index() -> None:
    """`windlass` belongs to another project there."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name == "windlass-llm"
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), *PACKAGE]
    for path in texts:
        for found in re.findall(r"pip install ['\"]?(windlass[\w-]*)", path.read_text()):
            assert found == name, path


def test_every_flag_of_serve_is_a_setting() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    lines = re.findall(r"^  (-.+?)(?:  |$)", shown, flags=re.MULTILINE)
    flags = {name for line in lines for name in re.findall(r"--[a-z][a-z-]*", line)}
    expected = {"--config", "--help"}
    sections = (ModelConfig, CacheConfig, SchedulerConfig, SpecConfig, LoraConfig)
    for section in (*sections, GrammarConfig, ParallelConfig, ServeConfig, GateConfig):
        for item in fields(section):
            long = [name for name in item.metadata["flags"] if name.startswith("--")]
            names = [flag(item.name), *long]
            expected.update(names)
            if item.type in ("bool", "bool | None"):
                expected.update(f"--no-{name.removeprefix('--')}" for name in names)
    assert flags == expected - {"--model"}
