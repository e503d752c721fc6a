"""What importing costs, and that imports run one way: core <- storage <- hooks <- command line."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "vllm", "megatron", "ray", "transformers")
# the files of a layer, and the parts of this project that they must not import
LAYERS = {
    "core": "r3/*.py",
    "storage": "storage/**/*.py",
    "engine_hooks": "engine_hooks/**/*.py",
    "trainer_hooks": "trainer_hooks/**/*.py",
}
FORBIDDEN = {
    "core": {"storage", "engine_hooks", "trainer_hooks", "cli"},
    "storage": {"engine_hooks", "trainer_hooks", "cli"},
    "engine_hooks": {"trainer_hooks", "cli"},
    "trainer_hooks": {"engine_hooks", "cli"},
}


@pytest.mark.parametrize("module", ["r3", "r3.storage", "r3.cli.inspect"])
def test_imports_nothing_heavy(module):
    code = f"import {module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & set(HEAVY)


def parts_imported(path: Path) -> set[str]:
    """Second names of all `r3.*` modules that a file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {n.split(".")[1] for n in names if n.startswith("r3.")}


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer):
    paths = list(ROOT.glob(LAYERS[layer]))
    assert paths
    for path in paths:
        wrong = parts_imported(path) & FORBIDDEN[layer]
        assert not wrong, f"{path} imports r3.{wrong.pop()}"


def test_no_pickle():
    for folder in ("r3", "storage", "engine_hooks", "trainer_hooks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                    assert not {"pickle", "cloudpickle", "dill"} & set(names), path
