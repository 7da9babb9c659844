"""Tests of dangerous globals. Globals that no checkpoint needs are found under all their names, including those of
Python 2. Other globals are not called dangerous.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pickle
import re
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.checkpoint import dangerous_calls
from ckptconv.checkpoint.dangerous_calls import dangerous_globals, reaches
from ckptconv.checkpoint.dangerous_globals import DANGEROUS_MODULES, DANGEROUS_NAMES, is_dangerous
from ckptconv.checkpoint.safe_globals import ADDED_BY, ALLOWED, IMPORTED_WITH_TORCH
from ckptconv.pickles.graph import Call, Global
from ckptconv.pickles.parser import parse
from tests.support.reduced import Reduced


def dangers(data: bytes) -> list[str]:
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    return sorted(dangerous_globals(graph))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (eval, "builtins.eval"), (exec, "builtins.exec")]
)
def test_calls_are_found_in_every_protocol(protocol: int, function: object, name: str) -> None:
    """Dangerous calls are found with GLOBAL and STACK_GLOBAL, and with the names of Python 2 or 3."""
    assert dangers(pickle.dumps([1, Reduced(function, ("x",))], protocol)) == [name]


def by_name(name: str) -> bytes:
    """Return a pickle of the global `name`."""
    module, _, attribute = name.rpartition(".")
    return b"\x80\x02c" + f"{module}\n{attribute}\n.".encode()


def tensor_subclasses() -> list[tuple[str, str]]:
    """Return the module and name of each subclass of Tensor in the source of torch, including subclasses of a subclass
    in the same module.
    """
    found = []
    root = Path(torch.__file__).parent
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"^class \w+\([^)]*\bTensor\b", source, re.MULTILINE):
            continue  # parsing all modules of torch takes a minute
        module = ".".join(("torch", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        bases = {"Tensor", "torch.Tensor"}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not bases.isdisjoint(map(ast.unparse, node.bases)):
                bases.add(node.name)
                found.append((module, node.name))
    return found


@pytest.mark.slow
def test_no_tensor_subclass_of_torch_is_dangerous() -> None:
    """Classes of tensors in torch are not dangerous, because a pickled tensor names its class. Other names in the same
    modules are dangerous.
    """
    torch.zeros(0)  # skips the test if torch is not installed
    found = tensor_subclasses()
    assert ("torch.testing._internal.two_tensor", "TwoTensor") in found and len(found) > 20
    assert [name for name in found if is_dangerous(Global(*name))] == []
    assert is_dangerous(Global("torch.testing._internal.two_tensor", "TwoTensorMode"))
    assert is_dangerous(Global("torch.testing._internal.two_tensor", "TwoTensor.torch.load"))
    assert is_dangerous(Global("torch.testing._internal.common_utils", "shell"))


#: Globals that advisories about pickle scanners report, from any module.
MISSED = [
    "torch.jit.unsupported_tensor_ops.execWrapper",
    "numpy.testing._private.utils.runstring",
    "torch.utils._config_module.ConfigModule.load_config",
    "torch._inductor.codecache.compile_file",
    "torch.utils.collect_env.run",
    "torch._dynamo.guards.GuardBuilder.get",
    "torch.utils.bottleneck.__main__.run_cprofile",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.hub.load",
    "idlelib.pyshell.ModifiedInterpreter.runcode",
    "idlelib.run.Executive.runcode",
    "idlelib.calltip.get_entity",
    "lib2to3.pgen2.grammar.Grammar.loads",
    "lib2to3.pgen2.pgen.ParserGenerator.make_label",
    "doctest.debug_script",
    "logging.config._resolve",
    "uuid._get_command_stdout",
    "_aix_support._read_cmd_output",
    "_osx_support._read_output",
    "_pyrepl.pager.pipe_pager",
    "ensurepip._run_pip",
    "pydoc.pipepager",
    "profile.run",
    "profile.Profile.runctx",
    "cProfile.runctx",
    "trace.Trace.run",
    "code.InteractiveInterpreter.runcode",
    "test.support.script_helper.assert_python_ok",
    "operator.call",
    "functools.reduce",
    "timeit.timeit",
    "pkgutil.resolve_name",
    "asyncio.unix_events._UnixSubprocessTransport._start",
    "distutils.file_util.write_file",
    "pip.main",
    "numpy.f2py.crackfortran.getlincoef",
    "ctypes.CDLL",
    "pty.spawn",
    "bdb.Bdb.run",
    "pdb.run",
    "ssl.get_server_certificate",
    "imaplib.IMAP4_stream",
    "http.client.HTTPConnection",
    "io.open",
    "shutil.rmtree",
    "pathlib.Path.write_text",
    "torch.save",
    "numpy.savez_compressed",
    "logging.handlers.RotatingFileHandler",
    "tokenize._builtin_open",
    "types.LambdaType",
    "torch.fx.graph_module._forward_from_src",
    "torch._utils._import_dotted_name",
    "pickle.loads",
    "torch.load",
    "torch.storage._load_from_bytes",
    "yaml.unsafe_load",
    "builtins.exec",
    "types.CodeType",
    "importlib.import_module",
    "marshal.loads",
]
#: Modules, and names with dots that lead from them to a dangerous module or to internal attributes.
LEADING = [
    ("torch.serialization", "os.system"),
    ("torch", "serialization.os.system"),
    ("torch.serialization", "os"),
    ("torch.serialization", "pickle.loads"),
    ("torch.storage", "torch.load"),
    ("torch.nn", "Module.__init__.__globals__"),
    ("collections", "OrderedDict.__subclasses__"),
    ("builtins", "object.__reduce_ex__"),
    ("functools", "partial.__builtins__"),
    ("numpy", "builtins.eval"),
    ("mine.commands", "Net.__class__.__mro__"),
    ("random", "_os.system"),
    ("collections", "_sys.modules"),
    ("torch", "builtins"),
    ("torch.serialization", "pickle"),
    ("enum", "bltns.eval"),
    ("torch.storage", "UntypedStorage.from_file"),
    ("torch.multiprocessing.reductions", "ForkingPickler.loads"),
    ("statistics", "reduce"),
]
#: Globals that are not dangerous: members of the user's modules with names from the standard library, and globals that
#: trainers save.
UNKNOWN = [
    "mine.os.Net",
    "mine.commands.Net",
    "mine.requests.Queue",
    "mine.torch.load.Net",
    "osmium.Net",
    "code.models.Net",
    "trace.models.Net",
    "test.models.Net",
    "profile.models.Net",
    "numpy.core.multiarray._reconstruct",
    "numpy.ndarray",
    "numpy.memmap",
    "numpy.random._pickle.__randomstate_ctor",
    "uuid.UUID",
    "logging.getLogger",
    "signal.Signals",
    "pathlib.PosixPath",
    "functools.partial",
    "argparse.Namespace",
    "copyreg._reconstructor",
    "torch.hubert.Net",
    "torch._C._profiler.ProfilerActivity",
    "torch.distributed.checkpoint.metadata.Metadata",
    "omegaconf.dictconfig.DictConfig",
    "_io.BytesIO",
    "datetime.datetime",
    "types.SimpleNamespace",
    "operator.itemgetter",
    "torch.package_of_mine.Net",
    "sklearn.pipeline.Pipeline",
    "cloudpickle.cloudpickle._make_function",
    "os.stat_result",
    "posix.stat_result",
    "os.terminal_size",
    "os.PathLike",
    "torch.distributed.reduce",
    "mine.Metric.reduce",
    "mine.Net.from_file",
]
#: Pickles, and the concern or None. pickle writes ``getattr(object, 'name')`` for methods and inner classes. A call of
#: ``getattr`` is dangerous if the name leads to internal attributes or modules, or is computed. ``getattr`` as a value
#: is dangerous if another function receives it.
GETATTR = [
    (b"cbuiltins\ngetattr\nctorch.nn\nModule\nX\x0b\0\0\0__globals__\x86R.", "builtins.getattr of '__globals__'"),
    (b"c__builtin__\ngetattr\nctorch\nserialization\nU\x02os\x86R.", "builtins.getattr of 'os'"),
    (b"cbuiltins\ngetattr\nctorch\nserialization\ncmine\nname\n)R\x86R.", "builtins.getattr of a computed name"),
    (b"cbuiltins\ngetattr\n)R.", "builtins.getattr of a computed name"),
    (b"coperator\nattrgetter\nX\x13\0\0\0__init__.__code__xx\x85R.", None),
    (b"coperator\nattrgetter\nX\x11\0\0\0__init__.__code__\x85R.", "operator.attrgetter of '__init__.__code__'"),
    (b"coperator\nmethodcaller\nX\x0e\0\0\0__subclasses__\x85R.", "operator.methodcaller of '__subclasses__'"),
    (b"cfunctools\npartial\ncbuiltins\ngetattr\n\x85R.", "builtins.getattr, passed as a value"),
    (b"(cbuiltins\ngetattr\nctorch.nn\nModule\nX\x0b\0\0\0__globals__o0N.", "builtins.getattr of '__globals__'"),
    (b"cbuiltins\ngetattr\ncmine\nfiles\nX\x03\0\0\0_os\x86R.", "builtins.getattr of '_os'"),
    (
        b"cbuiltins\ngetattr\nctorch.fx\ngraph_module\nX\x11\0\0\0_exec_with_source\x86R.",
        "builtins.getattr of '_exec_with_source'",
    ),
    (
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nctorch\nfx\nX\x0c\0\0\0graph_module\x86R"
        b"X\x11\0\0\0_exec_with_sourcetR.",
        "builtins.getattr of '_exec_with_source'",
    ),
    (b"coperator\nattrgetter\nX\x03\0\0\0sys\x85R.", None),
    (b"cmine\nf\ncoperator\nattrgetter\nX\x03\0\0\0sys\x85R\x85R.", "operator.attrgetter of 'sys'"),
    (b"cmine\nNet\n](coperator\nattrgetter\nX\x03\0\0\0sys\x85Re\x85R.", "operator.attrgetter of 'sys'"),
    (b"](cbuiltins\ngetattr\nK\x01e.", None),
    (b"cmine\nNet\n](cbuiltins\ngetattr\nK\x01e\x85R.", "builtins.getattr, passed as a value"),
    (b"](cbuiltins\ngetattr\nK\x01eq\x00cmine\nNet\nh\x00\x85R\x86.", "builtins.getattr, passed as a value"),
    (b"cbuiltins\ngetattr\ncmine\nNet\nX\x05\0\0\0Inner\x86R.", None),
    (b"cbuiltins\ngetattr\ncmine\nNet\nX\x04\0\0\0eval\x86R.", None),
]
MEMMAP = b"cnumpy\nmemmap\n"


def rebuilt(core: str) -> bytes:
    return f"cnumpy.{core}.multiarray\n_reconstruct\n".encode()


#: Pickles, and the dangerous globals in them.
PICKLES: dict[str, tuple[bytes, list[str]]] = {
    "a call whose result is discarded": (b"cos\nsystem\n(X\x01\x00\x00\x00xtR0N.", ["os.system"]),
    "below protocol 3, __builtin__ is builtins": (b"\x80\x02c__builtin__\neval\n.", ["builtins.eval"]),
    "from 3 on it is what it says to Python": (b"\x80\x04c__builtin__\neval\n.", ["__builtin__.eval"]),
    "STACK_GLOBAL takes its names from the stack": (
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93N0.",
        ["os.system"],
    ),
    "whatever put them there": (
        b"\x80\x04(\x8c\x06system\x94\x8c\x02os\x94lh\x01h\x00\x93\x86.",
        ["os.system"],
    ),
    "a qualified name": (b"\x80\x04\x8c\x02io\x8c\x0bopen.__call\x93.", ["io.open.__call"]),
    "a package called code can be anybody's": (b"\x80\x02ccode.models\nNet\n.", []),
    "what attacks use of the standard library's is named exactly": (
        b"\x80\x02ccode\ninteract\n.",
        ["code.interact"],
    ),
    "getattr and functools.partial are how pickle writes bound methods and keyword arguments": (
        pickle.dumps([functools.partial(int, base=2), [].append], 2),
        [],
    ),
    **{f"missed: {name}": (by_name(name), [name]) for name in MISSED},
    **{
        f"{module} lends {name}, by {how}": (data, [f"{module}.{name}"])
        for module, name in LEADING
        for how, data in (
            ("STACK_GLOBAL", b"\x80\x04V" + f"{module}\nV{name}\n".encode() + b"\x93."),
            ("GLOBAL", b"\x80\x04c" + f"{module}\n{name}\n.".encode()),
        )
    },
    **{f"unknown, and no more: {name}": (by_name(name), []) for name in UNKNOWN},
    **{f"getattr {i}: {said}": (b"\x80\x02" + code, [said] if said else []) for i, (code, said) in enumerate(GETATTR)},
    # numpy rebuilds a former memmap by its class. A call of the class opens a file, in every way in which it can be
    # called.
    **{
        f"numpy.{core}: an array that was in a file": (rebuilt(core) + b"(" + MEMMAP + b"(K\x00tU\x01btR.", [])
        for core in ("core", "_core")
    },
    **{
        f"numpy.{core}: a file that is opened through partial": (
            b"cfunctools\npartial\n(" + MEMMAP + b"V1\ntp0\nR0" + rebuilt(core) + b"g0\nR.",
            ["numpy.memmap"],
        )
        for core in ("core", "_core")
    },
    "what an attrgetter fetches": (
        b"\x80\x02coperator\nattrgetter\nX\x03\0\0\0sys\x85Rcmine\nNet\n\x85R.",
        ["mine.Net.sys", "operator.attrgetter of 'sys'"],
    ),
    "an attrgetter of more names than are looked at": (
        b"\x80\x02coperator\nattrgetter\n(" + b"X\x01\0\0\0a" * 51 + b"tRcmine\nNet\n\x85R.",
        ["operator.attrgetter of too many names to check"],
    ),
    "numpy.memmap called": (MEMMAP + b"(X\x01\0\0\0xtR.", ["numpy.memmap"]),
    "numpy.memmap made": (b"\x80\x02" + MEMMAP + b"X\x01\0\0\0x\x85\x81.", ["numpy.memmap"]),
    "numpy.memmap handed on": (
        b"\x80\x02cfunctools\npartial\n" + MEMMAP + b"X\x01\0\0\0x\x86R.",
        ["numpy.memmap"],
    ),
}


@pytest.mark.parametrize("case", PICKLES)
def test_dangerous_globals_of_pickles(case: str) -> None:
    """Exactly the dangerous globals and calls of a pickle are reported."""
    data, names = PICKLES[case]
    assert dangers(data) == names


def test_partial_function_with_many_states_is_unknown() -> None:
    """A call of a partial function with many states is unknown, because only a limited number of states is examined."""
    states = b"".join(b"(cmine\nf%d\n)}Ntb" % i for i in range(60))
    data = b"\x80\x02cfunctools\npartial\ncmine\nf\n\x85R" + states + b")R."
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    assert [what for what, _, kind in reaches(graph) if kind == "unknown"] == ["a call of the result of a call"]


def test_results_of_calls_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain of 300 calls of results of calls, each call is examined only once."""
    asked: list[int] = []
    given = dangerous_calls._Meanings._given

    def counted(self: dangerous_calls._Meanings, call: Call, *rest: Any) -> Any:
        asked.append(id(call))
        return given(self, call, *rest)

    monkeypatch.setattr(dangerous_calls._Meanings, "_given", counted)
    data = b"\x80\x02cmine\nf\n" + b")R" * 300 + b"."
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    assert {kind for _, _, kind in reaches(graph)} == {"unknown"}
    assert 0 < len(asked) == len(set(asked))


def test_loadable_globals_are_not_dangerous() -> None:
    """No global that torch's safe loader accepts is dangerous."""
    names = ALLOWED.union(IMPORTED_WITH_TORCH, *ADDED_BY.values())
    assert not [name for name in names if is_dangerous(Global(*name.rsplit(".", 1)))]


#: Names of harmless functions of dangerous modules that other modules contain, and of other functions with such a name.
HARMLESS = {
    "Lock", "active_children", "allocate_lock", "current_process", "daemon_threads_allowed", "default_int_handler",
    "distribution", "excepthook", "exit_thread", "fsdecode", "fsencode", "fspath", "get_ident", "get_main_thread_ident",
    "get_native_id", "gethostname", "getitimer", "getpid", "getrefcount", "intern", "is_main_interpreter",
    "iscoroutinefunction", "make_thread_handle", "normcase", "normpath", "packages_distributions", "parent_process",
    "path_normpath", "pause", "randombytes", "set_sentinel", "sigtimedwait", "sigwaitinfo", "splitroot", "stack_size",
    "strsignal", "thread_shutdown", "unquote", "urandom", "urljoin", "urlparse", "urlquote_from_bytes", "urlsplit",
    "urlunparse",
}  # a table  # fmt: skip


LENDERS = (
    "argparse", "bz2", "collections", "enum", "gzip", "logging.handlers", "lzma", "mailbox", "pickletools", "random",
    "tempfile", "threading", "tokenize", "tracemalloc", "turtle", "unittest.mock", "numpy", "torch",
)  # a table  # fmt: skip


def test_all_aliases_of_dangerous_functions_are_found() -> None:
    """No module of Python, numpy or torch contains a dangerous module or function under a name that is not dangerous.
    All modules that a new interpreter loads together with torch are checked.
    """
    here = [name for name in LENDERS if find_spec("tkinter") or name != "turtle"]
    for module in here:
        importlib.import_module(module)
    code = f"import sys, {', '.join(here)}; print(*sys.modules)"  # this process may have loaded more for earlier tests
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    lent = {id(sys.modules[name]): name for name in sys.modules if _is_dangerous_module(name)}
    lent |= {id(function): name for name in DANGEROUS_NAMES if (function := _loaded(name)) is not None}
    for name in [*sys.modules]:
        if name.split(".")[0] in DANGEROUS_MODULES:
            for attribute, value in vars(sys.modules[name]).items():
                if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and _is_dangerous_module(
                    str(value.__module__ or "")
                ):
                    lent.setdefault(id(value), f"{name}.{attribute}")
    missed = [
        f"{name}.{attribute} is {lent[id(value)]}"
        for name, module in [*sys.modules.items()]
        if name in loaded
        and name.split(".")[0] in sys.stdlib_module_names | {"torch", "numpy"}
        and not name.startswith("__")
        for attribute, value in [*getattr(module, "__dict__", {}).items()]
        if id(value) in lent
        and not attribute.startswith("@py_")
        and attribute.strip("_") not in HARMLESS
        and not is_dangerous(Global(name, attribute))
    ]
    assert len(lent) > 500 and not missed


def _is_dangerous_module(name: str) -> bool:
    return name.split(".")[0] in DANGEROUS_MODULES or name in ("builtins", "pickle")


def _loaded(name: str) -> object:
    """Return the object `name` if its module is loaded, and None otherwise."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:end]) in sys.modules:
            return functools.reduce(
                lambda of, word: getattr(of, word, None), parts[end:], sys.modules[".".join(parts[:end])]
            )
    return None
