"""The package runs no code from files or the network: no pickle, no eval, no shell, no remote code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "windlass").rglob("*.py"))

_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "telnetlib"}
_CALLS = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"),
    *(
        "yaml.full_load",
        "torch.load",
        "numpy.load",
        "np.load",
        "runpy.run_path",
        "ssl._create_unverified_context",
    ),
    *("tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput"),
}
_METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "all_gather_object",
    "broadcast_object_list",
    "scatter_object_list",
}
# Arguments that allow any of it.
_ARGUMENTS = {"shell": True, "trust_remote_code": True, "allow_pickle": True, "weights_only": False}
# `file: construct`, with the reason why it is safe.
_ALLOWED = dict.fromkeys(
    ("windlass/serve/keys_file.py: yaml.load", "windlass/cluster/fleet.py: yaml.load"),
    "the loader is a SafeLoader that refuses duplicate keys",
)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(source: str) -> Iterator[str]:
    """Every construct in `source` that could run foreign code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in _MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            if name in _CALLS or name.rpartition(".")[2] in _METHODS:
                yield name
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in _ARGUMENTS and value is _ARGUMENTS[keyword.arg]:
                    yield f"{name}({keyword.arg}={value})"


def test_no_file_can_run_foreign_code() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {violation}"
        for path in FILES
        for violation in violations(path.read_text(encoding="utf-8"))
    }
    assert found == set(_ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "subprocess.run(text, shell=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_the_rule_finds_each_construct(source: str) -> None:
    assert list(violations(source)) != []


def test_the_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    """A repository may name Python files in auto_map, for `trust_remote_code` of transformers."""
    from windlass.build import open_model
    from windlass.config import EngineConfig
    from windlass.errors import EngineError

    marker = tmp_path / "was-run"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass C: pass\n"
    (tmp_path / "modeling_evil.py").write_text(code)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["EvilForCausalLM"], "model_type": "evil", "auto_map": '
        '{"AutoConfig": "modeling_evil.C", "AutoModelForCausalLM": "modeling_evil.C"}}'
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    config = EngineConfig.of(model=str(tmp_path), device="cpu")
    with pytest.raises(EngineError):
        open_model(config)
    assert not marker.exists()
