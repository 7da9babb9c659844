"""What no checkpoint needs is found wherever a pickle names it, under Python 2's names too, and nothing else is called dangerous."""

from __future__ import annotations

import functools
import os
import pickle

import pytest

from ckptconv.dangers import dangerous_globals
from ckptconv.pickles import parse


def dangers(data: bytes) -> list[str]:
    graph, _ = parse(lambda offset, length: data[offset : offset + length], len(data), where="here")
    return sorted(dangerous_globals(graph))


class Runs:
    """Reduces to a call of whatever it is given."""

    def __init__(self, function: object) -> None:
        self.function = function

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.function, ("x",)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (eval, "builtins.eval"), (exec, "builtins.exec")]
)
def test_calls_are_found_in_every_protocol(protocol: int, function: object, name: str) -> None:
    """GLOBAL and STACK_GLOBAL, with names as Python 2 or 3 has them."""
    assert dangers(pickle.dumps([1, Runs(function)], protocol)) == [name]


def test_popped_calls_are_found() -> None:
    """A call whose result is thrown away is a call."""
    assert dangers(b"cos\nsystem\n(X\x01\x00\x00\x00xtR0N.") == ["os.system"]


def test_python_2_names_are_mapped() -> None:
    """Below protocol 3, __builtin__ is builtins; from 3 on it is what it says to Python, and builtins to torch's safe loader."""
    assert dangers(b"\x80\x02c__builtin__\neval\n.") == ["builtins.eval"]
    assert dangers(b"\x80\x04c__builtin__\neval\n.") == ["__builtin__.eval"]


def test_names_by_computed_strings_are_found() -> None:
    """STACK_GLOBAL takes its names from the stack, whatever put them there."""
    assert dangers(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93N0.") == ["os.system"]
    assert dangers(b"\x80\x04(\x8c\x06system\x94\x8c\x02os\x94lh\x01h\x00\x93\x86.") == ["os.system"]


def test_dotted_names_are_found() -> None:
    """A qualified name leads through a dangerous module or function all the same."""
    assert dangers(b"\x80\x04\x8c\x02io\x8c\x0bopen.__call\x93.") == ["io.open.__call"]


def test_a_module_of_the_user_is_not_dangerous_for_its_name() -> None:
    """A package called code or trace can be anybody's; what attacks use of those of the standard library is named exactly."""
    assert dangers(b"\x80\x02ccode.models\nNet\n.") == []
    assert dangers(b"\x80\x02ccode\ninteract\n.") == ["code.interact"]


def test_what_pickle_itself_writes_is_not_dangerous() -> None:
    """getattr and functools.partial are how pickle writes bound methods and keyword arguments."""
    assert dangers(pickle.dumps([functools.partial(int, base=2), [].append], 2)) == []


@pytest.mark.parametrize(
    "name",
    [
        "torch.jit.unsupported_tensor_ops.execWrapper", "numpy.testing._private.utils.runstring", "torch.utils._config_module.ConfigModule.load_config",
        "torch._inductor.codecache.compile_file", "torch.utils.collect_env.run", "torch._dynamo.guards.GuardBuilder.get", "torch.utils.bottleneck.__main__.run_cprofile",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression", "torch.utils.data.datapipes.utils.decoder.basichandlers", "torch.hub.load",
        "idlelib.pyshell.ModifiedInterpreter.runcode", "idlelib.run.Executive.runcode", "idlelib.calltip.get_entity", "lib2to3.pgen2.grammar.Grammar.loads",
        "lib2to3.pgen2.pgen.ParserGenerator.make_label", "doctest.debug_script", "logging.config._resolve", "uuid._get_command_stdout", "_aix_support._read_cmd_output",
        "_osx_support._read_output", "_pyrepl.pager.pipe_pager", "ensurepip._run_pip", "pydoc.pipepager", "profile.run", "profile.Profile.runctx", "cProfile.runctx", "trace.Trace.run",
        "code.InteractiveInterpreter.runcode", "test.support.script_helper.assert_python_ok", "operator.call", "functools.reduce", "timeit.timeit", "pkgutil.resolve_name",
        "asyncio.unix_events._UnixSubprocessTransport._start", "distutils.file_util.write_file", "pip.main", "numpy.f2py.crackfortran.getlincoef", "ctypes.CDLL", "pty.spawn",
        "bdb.Bdb.run", "pdb.run", "ssl.get_server_certificate", "imaplib.IMAP4_stream", "http.client.HTTPConnection", "io.open", "shutil.rmtree", "pathlib.Path.write_text",
        "pickle.loads", "torch.load", "torch.storage._load_from_bytes", "yaml.unsafe_load", "builtins.exec", "types.CodeType", "importlib.import_module", "marshal.loads",
    ],
)  # fmt: skip
def test_what_scanners_missed(name: str) -> None:
    """What advisories for pickle scanners report, in whatever module it stands."""
    module, _, attribute = name.rpartition(".")
    assert dangers(b"\x80\x02c" + f"{module}\n{attribute}\n.".encode()) == [name]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.serialization", "os.system"), ("torch", "serialization.os.system"), ("torch.serialization", "os"), ("torch.serialization", "pickle.loads"), ("torch.storage", "torch.load"),
        ("torch.nn", "Module.__init__.__globals__"), ("collections", "OrderedDict.__subclasses__"), ("builtins", "object.__reduce_ex__"), ("functools", "partial.__builtins__"),
        ("numpy", "builtins.eval"), ("mine.commands", "Net.__class__.__mro__"),
    ],
)  # fmt: skip
def test_what_attributes_lead_to(module: str, name: str) -> None:
    """A name with dots goes through a harmless module to a dangerous one, or to its innards; STACK_GLOBAL and GLOBAL alike."""
    assert dangers(b"\x80\x04V" + f"{module}\nV{name}\n".encode() + b"\x93.") == [f"{module}.{name}"]
    assert dangers(b"\x80\x04c" + f"{module}\n{name}\n.".encode()) == [f"{module}.{name}"]


@pytest.mark.parametrize(
    "name",
    [
        "mine.os.Net", "mine.commands.Net", "mine.requests.Queue", "mine.torch.load.Net", "osmium.Net", "code.models.Net", "trace.models.Net", "test.models.Net", "profile.models.Net",
        "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.memmap", "numpy.random._pickle.__randomstate_ctor", "uuid.UUID", "logging.getLogger", "signal.Signals",
        "pathlib.PosixPath", "functools.partial", "argparse.Namespace", "copyreg._reconstructor", "torch.hubert.Net", "torch.fx.graph_module.reduce_graph_module",
        "torch.distributed.checkpoint.metadata.Metadata", "omegaconf.dictconfig.DictConfig", "_io.BytesIO", "datetime.datetime", "types.SimpleNamespace", "operator.itemgetter",
        "torch.package_of_mine.Net", "sklearn.pipeline.Pipeline", "cloudpickle.cloudpickle._make_function",
    ],
)  # fmt: skip
def test_what_checkpoints_have_is_not_dangerous(name: str) -> None:
    """Modules of the user's that are called like the standard library's, and what trainers save, are unknown and no more."""
    module, _, attribute = name.rpartition(".")
    assert dangers(b"\x80\x02c" + f"{module}\n{attribute}\n.".encode()) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"cbuiltins\ngetattr\nctorch.nn\nModule\nX\x0b\0\0\0__globals__\x86R.", "builtins.getattr of '__globals__'"),
        (b"c__builtin__\ngetattr\nctorch\nserialization\nU\x02os\x86R.", "builtins.getattr of 'os'"),
        (b"cbuiltins\ngetattr\nctorch\nserialization\ncmine\nname\n)R\x86R.", "builtins.getattr of what is computed"),
        (b"cbuiltins\ngetattr\n)R.", "builtins.getattr of what is computed"),
        (b"coperator\nattrgetter\nX\x13\0\0\0__init__.__code__xx\x85R.", None),
        (b"coperator\nattrgetter\nX\x11\0\0\0__init__.__code__\x85R.", "operator.attrgetter of '__init__.__code__'"),
        (b"coperator\nmethodcaller\nX\x0e\0\0\0__subclasses__\x85R.", "operator.methodcaller of '__subclasses__'"),
        (b"cfunctools\npartial\ncbuiltins\ngetattr\n\x85R.", "builtins.getattr, not called"),
        (b"(cbuiltins\ngetattr\nctorch.nn\nModule\nX\x0b\0\0\0__globals__o0N.", "builtins.getattr of '__globals__'"),
        (b"cbuiltins\ngetattr\ncmine\nNet\nX\x05\0\0\0Inner\x86R.", None),
        (b"cbuiltins\ngetattr\ncmine\nNet\nX\x04\0\0\0eval\x86R.", None),
    ],
)  # fmt: skip
def test_getattr(code: bytes, said: str | None) -> None:
    """pickle writes ``getattr(object, 'name')`` for methods and inner classes; what leads to innards or modules, is computed, or hands the function on, is dangerous."""
    assert dangers(b"\x80\x02" + code) == ([said] if said else [])
