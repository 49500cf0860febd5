# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""What `import hf_ttt` loads, and what its source must not contain. (benchmarks/bench_import.py has its seconds.)"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_ttt

SOURCE = Path(hf_ttt.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
CORE = re.compile(r"(ttt_|cache_|configuration_|modeling_|processing_|image_processing_).*\.py")
EXTRAS = {"accelerate", "datasets", "evaluate", "lm_eval", "matplotlib", "pandas", "peft", "torchao", "triton"}

# what transformers itself loads for a model with a generation cache and for the Auto classes
TRANSFORMERS = """
import json, sys
import transformers.modeling_utils
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
"""
WITH_GENERATION = """
from transformers.generation import GenerationMixin
from transformers.cache_utils import DynamicCache
from transformers import masking_utils, modeling_layers, modeling_outputs, modeling_rope_utils
before = set(sys.modules)
import hf_ttt
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run_python(code: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, with the search path of this one."""
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    command = [sys.executable, "-c", path + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)


def test_import_loads_no_extras():
    """Beyond what transformers imports for any model that generates, importing the package loads only the package."""
    loaded = json.loads(run_python(TRANSFORMERS + WITH_GENERATION).stdout.splitlines()[-1])
    names = {name.split(".")[0] for name in loaded}
    assert "hf_ttt" in names and not names & EXTRAS
    assert names <= {"hf_ttt", "transformers", "tokenizers"} | set(sys.stdlib_module_names)
    around = ("hf_ttt.metrics", "hf_ttt.analysis", "hf_ttt.conversion", "hf_ttt.hub", "hf_ttt.cli", "hf_ttt.timing")
    assert not any(name.startswith(around) for name in loaded)


def test_public_names():
    assert len(set(hf_ttt.__all__)) == len(hf_ttt.__all__) and hf_ttt.__all__ == sorted(hf_ttt.__all__)
    for name in hf_ttt.__all__:
        assert getattr(hf_ttt, name).__module__.startswith("hf_ttt."), name
        assert getattr(hf_ttt, name).__doc__, name
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", hf_ttt.__version__)


# ---- rules for the source ----


def nodes(file: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def is_core(file: Path) -> bool:
    """Whether the file is copied beside the weights, or imported by `import hf_ttt`."""
    return file.parent == SOURCE and CORE.fullmatch(file.name) is not None


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_is_written_through_data(file):
    """`w.data.normal_()` in `_init_weights` overwrote loaded weights, with no missing key and no warning."""
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and node.attr == "data":
            raise AssertionError(f"{file.name}:{node.lineno} uses .data: {ast.unparse(node)}")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_of_siblings_name_the_file(file):
    """`from . import scan` is saved without the file it names, and loading the saved folder fails."""
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.module is not None, f"{file.name}:{node.lineno} {ast.unparse(node)}"
            assert not is_core(file) or (node.level == 1 and "." not in node.module), f"{file.name}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            assert not is_core(file), f"{file.name}:{node.lineno} {ast.unparse(node)}"


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "cli.py"], ids=name_of)
def test_nothing_is_printed(file):
    """A line for each layer was printed when a model was built."""
    for node in nodes(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{file.name}:{node.lineno}"


@pytest.mark.parametrize("file", [file for file in FILES if is_core(file)], ids=name_of)
def test_arithmetic_is_real(file):
    """Complex tensors are not there for compilers, exporters and half precision."""
    names = {"complex", "polar", "view_as_complex", "view_as_real", "cfloat", "cdouble", "complex64", "complex128"}
    for node in nodes(file):
        if isinstance(node, ast.Attribute):
            assert node.attr not in names, f"{file.name}:{node.lineno} {ast.unparse(node)}"
        if isinstance(node, ast.Constant):
            assert not isinstance(node.value, complex), f"{file.name}:{node.lineno}"


@pytest.mark.parametrize("file", [file for file in FILES if is_core(file)], ids=name_of)
def test_core_files_have_one_licence_line_and_a_docstring(file):
    """transformers' tests of models look for the line."""
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.\n")
    assert ast.get_docstring(ast.parse(text))


def test_no_module_reads_the_weights_of_a_linear_layer():
    """A fused op that read o_proj.weight skipped LoRA, and met packed bytes in a quantised layer."""
    for file in FILES:
        for node in nodes(file):
            if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.value, ast.Attribute):
                path = ast.unparse(node)  # only to give it a zero gradient where rates are fixed
                allowed = ("self.lr_proj.weight", "self.lr_fc.weight")
                assert path in allowed, f"{file.name}:{node.lineno} {path}"
