"""Tests of the table of dangerous names in libraries: how a name is looked up, how the table is made, and that it
contains all names of an object.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptconv.checkpoint.dangerous_globals import is_dangerous, is_known_package, is_method, listed
from ckptconv.pickles.graph import Global
from tools.danger_table import flows, make, primitives
from tools.danger_table.modules import Library

# Looking up names


@pytest.mark.parametrize(
    ("module", "name", "entry"),
    [
        ("inspect", "getmodule", "name"),
        ("pathlib", "Path.mkdir", "name"),
        ("pathlib", "PosixPath.mkdir", "name"),
        ("pathlib", "Path", None),
        ("pathlib", "PurePath.joinpath", None),
        ("gzip", "GzipFile", "class"),
        ("numpy", "memmap", "new"),
        ("numpy._core.memmap", "memmap", "new"),
        ("copyreg", "dispatch_table", "table"),
        ("torch.serialization", "_open_file", "class"),
        ("torch", "utils.file_baton.FileBaton.try_acquire", "name"),
        ("torch.nn", "Module", None),
        ("string", "Formatter.get_field", "name"),
        ("mine", "gzip.GzipFile", "class"),
        ("mine", "GzipFile", None),
        ("collections", "namedtuple", None),
    ],
)
def test_listed(module: str, name: str, entry: str | None) -> None:
    """The table contains functions, constructors, methods that a class inherits, and names that a module imports from
    another one.
    """
    assert listed(module, name) == entry


def test_too_many_attributes_are_dangerous() -> None:
    assert listed("torch", "a." * 30 + "b") == "name"


def test_methods_by_name() -> None:
    """Methods of paths and files are dangerous by name, unless dicts, texts or tensors have a method of that name. In
    classes of known packages, only methods that are written in C are dangerous by name.
    """
    assert is_method("write_bytes") and is_method("extractall") and not is_method("get") and not is_method("type")
    assert is_method("tofile", of_known_class=True) and not is_method("write_bytes", of_known_class=True)
    assert is_known_package("torch.nn") and not is_known_package("mine.torch")


def test_table_is_read_only_if_needed(tmp_path: Path) -> None:
    """The table is not read during the import of the package, nor for a file of which torch's safe loader accepts
    everything.
    """
    code = (
        "import sys, torch, ckptconv; from ckptconv.inspection.verification import verify\n"
        "from ckptconv.checkpoint.dangerous_globals import _table\n"
        "torch.save({'w': torch.ones(1)}, sys.argv[1])\n"
        "verify(sys.argv[1]); print(_table.cache_info().currsize)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"


# Making the table


def judged(source: str, **others: str) -> set[str]:
    """Return the entries of the table for the module ``m`` with `source`, next to the modules `others`."""
    library = Library()
    for name, text in {"m": source, **others}.items():
        library.add(name, text.encode(), is_package=False)
    return make.entries(library)["m"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\ndef f(a): os.system(a)", {"f"}),
        ("import os\ndef f(a): os.getcwd(a)", set()),
        ("import os\ndef f(): os.system('true')", set()),
        ("from os import system as s\ndef f(a): s(a)", {"f", "s"}),
        ("def f(a):\n    from os import system\n    b = ['x', a]\n    system(' '.join(b))", {"f"}),
        ("import os\ndef g(a, b): os.mkdir(b)\ndef f(a): g(a, 'x')\ndef h(a): g('x', b=a)", {"g", "h"}),
        ("import os\ndef g(*a): os.mkdir(a)\ndef f(a): g('x', 'y', a)", {"g", "f"}),
        ("import os\ndef f(a): os.mkdir(str(len(a)))", set()),
        ("import os\nclass C:\n    def __init__(self, a): os.mkdir(a)\ndef f(a): C(a)", {"C()", "C.__init__", "f"}),
        ("import os\nclass C:\n    def __new__(cls, a): os.mkdir(a)", {"C(new)", "C.__new__"}),
        ("import os\nclass C:\n    def __del__(self): os.unlink(self.x)", {"C", "C.__del__"}),
        (
            "import os\nclass C:\n    def __init__(self, a): self.a = a\n    def m(self): os.mkdir(self.a)\n"
            "class D(C): pass\ndef f(a):\n    d = D(a)\n    d.m()",
            {"C.m", "D<m.C", "f"},
        ),
        (
            "class C:\n    def __init__(self, a):\n        self.o = open\n        self.a = a\n        self.m()\n"
            "    def m(self): self.o(self.a)",
            {"C()", "C.__init__", "C.m"},
        ),
        ("import os\ndef f(a, do=os.mkdir): do(a)", {"f"}),
        ("import os, functools\ndef f(a): return functools.partial(os.mkdir, a)", {"f"}),
        (
            "import os\nclass C:\n    def m(self): os.mkdir(self.a)\ndef f(a):\n    if isinstance(a, C): a.m()",
            {"C.m", "f"},
        ),
        ("def f(a): a.extractall()", {"f"}),
        ("def f(a): a.count()", set()),
        ("def f(a, b): return getattr(a, b)", {"f"}),
        ("def f(a, b): return getattr(a, b, None) is None", set()),
        ("def f(a, b):\n    for each in b.split('.'): a = getattr(a, each)\n    return a", {"f"}),
        ("import sys\ndef f(a): return sys.modules[a]", {"f"}),
        ("class C:\n    def m(self, a): return getattr(self, a)", {"C.m?"}),
        ("def f():\n    breakpoint()", {"f"}),
        ("import builtins\ne = getattr(builtins, 'exec')\ndef f(a): e(a)", {"e", "f"}),
        ("X = {}\nY = ()\n", {"X[]"}),
        ("from n import f as g, C as D", {"g", "D=n.C"}),
        ("from n import *", {"f", "C=n.C"}),
        ("try:\n    from n import f\nexcept ImportError:\n    def f(a): return a", {"f"}),
    ],
)
def test_harmful_functions_are_found(source: str, found: set[str]) -> None:
    """The analysis of the source finds harmful functions: it follows arguments through calls, variables, attributes,
    defaults, classes and other modules.
    """
    other = "import os\ndef f(a): os.mkdir(a)\nclass C:\n    def m(self): os.mkdir(self.a)\ni = C()"
    assert judged(source, n=other) == found


def test_listed_exceptions_are_respected() -> None:
    """A function that is listed as harmless is not judged harmful, and neither are its callers. A function that is
    listed as harmful alone does not make its callers harmful.
    """
    library = Library()
    library.add("m", b"def f(a): eval(a)\ndef g(a): f(a)\ndef h(a): eval(a)\ndef i(a): h(a)", is_package=False)
    verdicts = flows.judge(
        library, primitives.is_harmful, primitives.is_always, "m.f".__eq__, "m.h".__eq__, primitives.METHODS
    )
    assert sorted(str(function) for function, harm in verdicts.harm.items() if harm) == ["m.h"]


def test_a_relative_import() -> None:
    library = Library()
    library.add("p.a", b"import os\ndef f(a): os.mkdir(a)", is_package=False)
    library.add("p", b"from .a import f\nfrom . import a as b", is_package=True)
    library.add("p.q.c", b"from ..a import f as g\nfrom .. import b", is_package=False)
    found = make.entries(library)
    assert {name: found[name] for name in ("p", "p.a", "p.q.c")} == {"p": {"f"}, "p.a": {"f"}, "p.q.c": {"g"}}
    assert make.aliases(library) == {"b": {"p.a"}}


def test_harmful_names_of_a_module_in_c() -> None:
    """A module in C has no source. Names that are known to be harmful in it are found in its package, and in modules
    that use them.
    """
    library = Library()
    library.add("torch", b"from torch import _C as _C\nfrom torch._C import *", is_package=True)
    library.add("m", b"import torch\nUnit = torch._C.CompilationUnit\nother = torch._C.other", is_package=False)
    found = make.entries(library)
    assert found["m"] == {"Unit"} and "CompilationUnit" in found["torch"]


@pytest.mark.parametrize("name", sorted(primitives.HARMFUL))
def test_harmful_functions_in_c(name: str) -> None:
    """Each name in the list of harmful functions in C is dangerous or is in the table."""
    module, _, attribute = f"{name}any".rpartition(".") if name.endswith(".") else name.rpartition(".")
    assert is_dangerous(Global(module, attribute)) or listed(module, attribute)


# The installed libraries

#: Modules to import. The names in all loaded modules are compared. The list has no turtle, which needs a screen, and no
#: antigravity, which opens a browser.
MODULES = (
    "argparse", "configparser", "http.cookiejar", "logging.config", "mailbox", "pstats", "pydoc", "tracemalloc", "wave",
    "unittest.mock", "xml.dom.minidom", "xml.etree.ElementTree", "numpy", "torch", "torch._dynamo", "torch.export",
    "torch.distributed.checkpoint", "torch.fx", "torch.package", "torch.utils.benchmark", "jinja2", "networkx",
    "fsspec",
)  # fmt: skip

#: Names that modules create during their import.
MADE = {"_io.open_code", "torch._dynamo.guards._method", "torch._dynamo.exc.format_exc", "torch.xpu.c_uint32"}

COMPARE = """
import importlib, sys, types, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    importlib.import_module(name)
from ckptconv.checkpoint.dangerous_globals import is_known_package, listed
from ckptconv.checkpoint.dangerous_globals import leads_to_danger
compared = 0
for name, module in [*sys.modules.items()]:
    if is_known_package(name) and name.split(".")[0] != "sympy":
        for attribute, value in [*vars(module).items()]:
            if not issubclass(type(value), (type, types.FunctionType, types.BuiltinFunctionType)):
                continue
            of, full = value.__module__, value.__qualname__
            if isinstance(of, str):
                compared += 1
                entry = listed(of, full) if "<" not in full else None
                if entry and not leads_to_danger(name, attribute) and listed(name, attribute) != entry:
                    print(f"{name}.{attribute}")
assert compared > 20_000, compared
"""


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.skipif(make.PYTHON not in make.read_table().pythons, reason="the table was made with other Pythons")
def test_object_has_the_same_entry_under_all_names() -> None:
    """If the table contains an object under its own name, it contains the same entry under each name that an imported
    module has for the object.
    """
    told = subprocess.run([sys.executable, "-c", COMPARE, *MODULES], capture_output=True, text=True, check=True)
    assert set(told.stdout.split()) <= MADE
