"""Facts about the safe loader of the installed torch, as lines of text, and a table of the facts of all versions.

``python -m tests.support.torch_facts`` adds the installed torch to ``torch_facts.txt``. The difference in that file
shows the changes of a new version: names on the list, attributes, devices, layouts, and functions with changed code (a
hash without annotations and docstrings). A line without versions is a fact of every version.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("torch_facts.txt")
#: Modules of torch that add names to the safe list when they are imported.
MODULES = ("torch.nested", "torch.distributed.tensor", "torch._dynamo")
#: Functions whose code decides what loads, by their modules.
CODE = {
    "torch._weights_only_unpickler": "Unpickler.load Unpickler.persistent_load _get_allowed_globals",
    "torch._utils": (
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor _rebuild_sparse_tensor"
        " _rebuild_nested_tensor _rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass _rebuild_parameter"
        " _rebuild_parameter_with_state _rebuild_device_tensor_from_numpy _rebuild_device_tensor_from_cpu_tensor"
        " _set_obj_state _validate_loaded_sparse_tensors set_tensor_metadata"
    ),
    "torch._tensor": "_rebuild_from_type_v2 Tensor.__setstate__",
    "torch.nn.parameter": "Parameter.__new__ Parameter.__setstate__",
    "torch.serialization": "load _load _legacy_load _get_layout _is_zipfile _should_read_directly",
    "torch.distributed.checkpoint.metadata": "TensorProperties.__getstate__ TensorProperties.__setstate__",
}
_OF_ADDED = """
import importlib, sys, torch
if sys.argv[1]:
    before = {*torch.serialization.get_safe_globals()}
    importlib.import_module(sys.argv[1])
else:
    before = set()
for each in {*torch.serialization.get_safe_globals()} - before:
    print(each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}")
"""


def version() -> tuple[int, int]:
    """Return the version of the installed torch, without its patch release."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def facts(*, imports: bool = True) -> set[str]:
    """Return the facts of the installed torch. `imports` adds the names that imports add, and the hashes of
    functions.
    """
    import torch
    from torch import _weights_only_unpickler as safe

    allowed = safe._get_allowed_globals()
    found = {f"allowed {name}" for name in allowed}
    is_pybind = getattr(torch._C, "_is_pybind11_type", lambda cls: False)
    found |= {f"pybind11 {name}" for name, each in allowed.items() if isinstance(each, type) and is_pybind(each)}
    for module in ("", *MODULES) if imports else ():
        ran = subprocess.run([sys.executable, "-W", "ignore", "-c", _OF_ADDED, module], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        found |= {f"added-by {module or 'torch'} {name}" for name in ran.stdout.split()}
    found |= {
        f"attribute {name}"
        for cls in torch.nn.Parameter.__mro__
        for name, value in vars(cls).items()
        if hasattr(type(value), "__set__") and not name.startswith("__")
    }
    found |= {f"layout {value}" for value in vars(torch).values() if isinstance(value, torch.layout)}
    found |= {
        f"dtype {name}"
        for name, value in vars(torch).items()
        if str(value) == f"torch.{name}" and isinstance(value, torch.dtype)
    }
    try:
        torch.device("foo")
    except RuntimeError as error:
        listed = re.search(r"one of (.*?) device", str(error))
        assert listed
        found |= {f"device {name}" for name in listed[1].split(", ")}
    return found.union(*(_of_code(module, names) for module, names in CODE.items() if imports))


def _of_code(module: str, names: str) -> Iterator[str]:
    """Yield the signature and the hash of each function in `names` of `module`."""
    for name in names.split():
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part, None)
        if function is not None:
            source = ast.parse(textwrap.dedent(inspect.getsource(function)))
            digest = hashlib.sha256(ast.unparse(_Bare().visit(source)).encode()).hexdigest()
            arguments = ", ".join(inspect.signature(function).parameters)
            yield f"code {module}.{name}({arguments}) {digest[:12]}"


class _Bare(ast.NodeTransformer):
    """A transformer that removes annotations, docstrings and the stacklevel of warnings."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value, lineno=node.lineno) if node.value else None

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.keywords = [each for each in node.keywords if each.arg != "stacklevel"]
        return node


def table() -> dict[tuple[int, int], set[str]]:
    """Return the facts of every version in the file."""
    first, *lines = TABLE.read_text().splitlines() if TABLE.exists() else [""]
    found: dict[tuple[int, int], set[str]] = {_version(word): set() for word in first.split()[1:]}
    for line in lines:
        fact, _, ranges = line.partition("  ")
        for each in found:
            if not ranges or any(_is_in(each, words) for words in ranges.split()):
                found[each].add(fact)
    return found


def _version(word: str) -> tuple[int, int]:
    major, minor = word.split(".")
    return int(major), int(minor)


def _is_in(version: tuple[int, int], words: str) -> bool:
    first, _, last = words.partition("-")
    return _version(first) <= version <= _version(last or first)


def text(found: dict[tuple[int, int], set[str]]) -> str:
    """Return the text of the file for the facts `found`: the versions, and then each fact with its versions, unless all
    versions share it.
    """
    every = sorted(found)
    versions_of = defaultdict[str, list[int]](list)
    for i, each in enumerate(every):
        for fact in found[each]:
            versions_of[fact].append(i)
    lines = ["versions " + " ".join(f"{major}.{minor}" for major, minor in every)]
    for fact, at in sorted(versions_of.items()):
        runs: list[list[int]] = []
        for i in at:
            if runs and runs[-1][1] == i - 1:
                runs[-1][1] = i
            else:
                runs.append([i, i])
        words = ["-".join(f"{every[i][0]}.{every[i][1]}" for i in dict.fromkeys(run)) for run in runs]
        lines.append(fact if len(at) == len(every) else f"{fact}  {' '.join(words)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text({**table(), version(): facts()}))
