"""The walk-throughs of docs/adding.md, applied to a copy of the package and run on tiny models."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding.md"
_BLOCK = re.compile(r"^```python\n# (\S+\.py)(?:, (imports|in [^\n]+))?\n(.*?)^```$", re.M | re.S)


def apply(package_root: Path, name: str, where: str | None, code: str) -> None:
    path = package_root / name
    if where is None:
        assert not path.exists(), f"{name} exists; the page must add a new file"
        path.write_text(code, encoding="utf-8")
        return
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    if where == "imports":
        last = max(
            node.end_lineno or 0
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
        lines.insert(last, code)
        path.write_text("".join(lines), encoding="utf-8")
        return
    number, column = opening_bracket(tree, lines, where.removeprefix("in "))
    line = lines[number]
    lines[number] = f"{line[: column + 1]}\n{code}{line[column + 1 :]}"
    path.write_text("".join(lines), encoding="utf-8")


def opening_bracket(tree: ast.Module, lines: list[str], name: str) -> tuple[int, int]:
    """Line index and column of the bracket that opens `NAME` or `NAME["key"]`."""
    found = re.fullmatch(r'(\w+)(?:\["(\w+)"\])?', name)
    assert found is not None, name
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(each, ast.Name) and each.id == found[1] for each in targets):
            continue
        value = node.value  # type: ignore[attr-defined]
        if found[2]:
            keys = [key.value for key in value.keys]
            value = value.values[keys.index(found[2])]
        number = value.lineno - 1
        column = next(
            i for i, char in enumerate(lines[number]) if i >= value.col_offset and char in "[{("
        )
        return number, column
    raise AssertionError(f"{name} is not assigned at the top level")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package with all walk-throughs applied."""
    folder = tmp_path_factory.mktemp("adding")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "windlass", folder / "windlass", ignore=ignored)
    blocks = _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) >= 13
    for name, where, code in blocks:
        apply(folder, name, where or None, code)
    return folder


def run(package: Path, program: str, *arguments: str) -> None:
    """Run a program that imports the copy, and the tests' helpers."""
    path = os.pathsep.join(map(str, (package, ROOT, ROOT / "benchmarks" / "scripts")))
    result = subprocess.run(
        [sys.executable, "-c", _PRELUDE + program, str(package), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


_PRELUDE = """
import sys
from pathlib import Path
import torch
import windlass
from windlass import LLM, SamplingParams
from tests.models import tiny

assert windlass.__file__.startswith(sys.argv[1])
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPT = list(range(3, 20))

def make(folder, **options):
    return LLM(str(folder), device="cpu", num_blocks=64, num_threads=1, **options)

def dummy(name, architecture="LlamaForCausalLM", **options):
    folder = Path(sys.argv[2]) / name
    folder.mkdir(exist_ok=True)
    tiny.write_json(folder / "config.json", tiny.config(architectures=[architecture]))
    return make(folder, load_format="dummy", **options)

def complete(llm):
    return llm.generate([PROMPT], GREEDY)[0].outputs[0]
"""


def test_every_block_of_the_page_is_applied() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python\n") == len(_BLOCK.findall(text))


@pytest.mark.parametrize("name", ["adding.md", "architecture.md", "words.md"])
def test_every_file_that_a_page_names_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    known = [
        path.as_posix()
        for area in ("windlass", "tests")
        for path in (ROOT / area).rglob("*")
        if path.suffix in {".py", ".h", ".cpp"}
    ]
    for file in re.findall(r"`([\w/]+\.(?:py|h|cpp))", prose):
        assert any(path.endswith(f"/{file}") for path in known), file


def test_the_architecture_page_lists_every_package_and_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\b\w+(?:/|\.py)", text.partition("An arrow means")[0]))
    own = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "windlass").iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }
    assert own <= listed


def test_a_model(package: Path, tmp_path: Path) -> None:
    program = """
capped, plain = complete(dummy("new", "SkylarkForCausalLM")), complete(dummy("llama"))
assert capped.token_ids == plain.token_ids  # a soft cap keeps the order of the logits
assert capped.logprobs != plain.logprobs
"""
    run(package, program, str(tmp_path))


def test_a_weight_format(package: Path, tmp_path: Path) -> None:
    program = """
torch.manual_seed(0)
sizes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256),
         "self_attn.v_proj": (128, 256), "self_attn.o_proj": (256, 256),
         "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
plain = {"model.embed_tokens.weight": torch.randn(96, 256), "model.norm.weight": torch.ones(256),
         "lm_head.weight": torch.randn(96, 256) * 0.1}
for i in range(tiny.LAYERS):
    for norm in ("input_layernorm", "post_attention_layernorm"):
        plain[f"model.layers.{i}.{norm}.weight"] = torch.ones(256)
stored = dict(plain)
for i in range(tiny.LAYERS):
    for name, shape in sizes.items():
        path = f"model.layers.{i}.{name}"
        codes = torch.randint(-127, 128, shape, dtype=torch.int8)
        scales = (torch.rand(shape[0], 1) + 0.5) / 1000
        stored |= {f"{path}.weight": codes, f"{path}.weight_scale": scales}
        plain[f"{path}.weight"] = codes * scales
folder = Path(sys.argv[2])
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(96)}, merges=[]))
for name in ("rowwise", "plain"):
    (folder / name).mkdir()
    tokenizer.save(str(folder / name / "tokenizer.json"))
config = {"quantization_config": {"quant_method": "rowwise"}}
tiny.write_folder(folder / "rowwise", stored, **config)
quantised = make(folder / "rowwise", plain_kernels=True)
reference = make(tiny.write_folder(folder / "plain", plain), plain_kernels=True)
from windlass.cli.model_report import examine
from windlass.config import EngineConfig
layers = examine(EngineConfig.of(model=str(folder / "rowwise")))["linear_layers"]
assert sum(item["method"] == "rowwise int8" for item in layers) == 4, layers
assert complete(quantised).token_ids == complete(reference).token_ids
"""
    run(package, program, str(tmp_path))


def test_a_kernel(package: Path, tmp_path: Path) -> None:
    program = """
from windlass.kernels import reference, sigmoid
x = torch.randn(3, 34)
torch.testing.assert_close(sigmoid.silu_mul(x), reference.silu_mul(x))
llm = dummy("kernel")
assert any(item.what == "sigmoid kernels" for item in llm.report.choices)
assert len(complete(llm).token_ids) == 8
"""
    run(package, program, str(tmp_path))


def test_a_scheduling_policy(package: Path, tmp_path: Path) -> None:
    program = """
from windlass.core.types import NewRequest
llm = dummy("policy", scheduling_policy="shortest", max_num_seqs=1)
for name, length in (("long", 30), ("short", 3), ("medium", 9)):
    llm.engine.add(NewRequest(name, list(range(1, 1 + length)), GREEDY))
finished = []
while llm.engine.has_work:
    finished += [output.request_id for output in llm.engine.step() if output.finish]
assert finished == ["short", "medium", "long"], finished
"""
    run(package, program, str(tmp_path))


def test_a_proposer(package: Path, tmp_path: Path) -> None:
    program = """
drafting = dummy("drafting", spec="repeat", spec_tokens=3)
assert any("repeat, up to 3" in item.value + item.reason for item in drafting.report.choices)
assert complete(drafting).token_ids == complete(dummy("plain")).token_ids
"""
    run(package, program, str(tmp_path))
