"""Tests of complete pickled modules. The extracted state dict equals the result of torch's ``state_dict()``, and a new
model loads it.
"""

from __future__ import annotations

import pickletools
import shlex
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import ckptconv
from ckptconv.byteranges.sources import Source
from ckptconv.cli.main import main
from ckptconv.errors import CkptconvError, NoMatchError, RefusedError
from ckptconv.formats import opening
from ckptconv.inspection.summary import inspect
from tests.support import zoo
from tests.support.archives import records_of, rezip
from tests.support.command import Command
from tests.support.conversions import refused
from tests.support.round_trips import round_trip

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Everything(nn.Module):
    """A module with parameters and buffers of all kinds, and with attributes that are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)  # defined before the parameters, but state_dict() lists the parameters first
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(2, 3).t())
        self.halved = nn.Parameter(torch.randn(4).bfloat16())
        self.view = nn.Parameter(torch.randn(10)[3:7])
        self.tagged = nn.Parameter(torch.randn(2))
        self.tagged.note = {"a": 1}  # type: ignore[attr-defined]
        self.register_parameter("none", None)
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("nothing", None)
        self.register_buffer("cache", torch.randn(5), persistent=False)
        self.buffer = nn.Buffer(torch.randn(2))
        self.register_buffer("learned", torch.randn(2).requires_grad_())
        self.plain = torch.randn(7)
        self.cells = [nn.Linear(2, 2)]
        self.best = {"weight": torch.randn(2), "bias": torch.randn(2)}
        self.tail = nn.Linear(3, 3)
        self.tail.weight = self.head.weight
        self.again = self.head
        self.same = self.frozen
        self.missing = None


def odd_names() -> nn.Module:
    """Return a module with names that are escaped in paths, and with names that look like parts of paths."""
    net = nn.Module()
    for i, name in enumerate(("a/b", "[0]", "_parametersx", "\\", "<0>", "(0)", "{0}", "ä \x1b[31m", "a\\2", "a")):
        net.register_parameter(name, nn.Parameter(torch.full((2,), float(i))))
        net.add_module("m" + name, nn.Linear(1, 1))
    return net


def shared() -> nn.Module:
    """Return a module that contains the same module in three places. One of them is inside another module."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))
    return nn.ModuleDict({"a": inner, "list": nn.ModuleList([inner, nn.Sequential(inner)]), "b": inner[0]})


def lists() -> nn.Module:
    made = nn.Module()
    made.list = nn.ParameterList([nn.Parameter(torch.ones(i + 1)) for i in range(12)])
    made.dict = nn.ParameterDict({"b": nn.Parameter(torch.ones(1)), "a": nn.Parameter(torch.ones(2))})
    made.nested = nn.ParameterList([torch.zeros(1), nn.Parameter(torch.ones(1))])
    made.modules_ = nn.ModuleDict({"z": nn.ModuleList([nn.Linear(1, 1) for _ in range(11)]), "a": nn.Identity()})
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "zoo": zoo.Net,
    "odd_names": odd_names,
    "shared": shared,
    "compiled inside": lambda: nn.ModuleDict({"plain": nn.Linear(2, 2), "fast": torch.compile(nn.Linear(2, 2))}),
    "norms": lambda: nn.Sequential(
        nn.BatchNorm2d(3),
        nn.BatchNorm1d(3, affine=False),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.InstanceNorm2d(3, track_running_stats=True, affine=True),
        nn.InstanceNorm1d(3),
        nn.GroupNorm(1, 3),
        nn.LayerNorm(3),
        nn.RMSNorm(3),
        nn.SyncBatchNorm(3),
        nn.LocalResponseNorm(2),
    ),
    "lists": lists,
    "weight_norm": lambda: nn.Sequential(
        nn.utils.weight_norm(nn.Linear(3, 2)), nn.utils.spectral_norm(nn.Conv1d(1, 2, 3))
    ),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2),
    "gru": lambda: nn.Sequential(nn.GRU(3, 4, bias=False), nn.GRUCell(2, 2)),
    "attention": lambda: nn.ModuleList(
        [nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, bias=False, kdim=3, vdim=5, add_bias_kv=True)]
    ),
    "transformer": lambda: nn.Transformer(4, 2, 1, 2, 8),
    "no_bias": lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Conv2d(1, 1, 1, bias=False)),
    "convolutions": lambda: nn.Sequential(
        nn.Conv3d(1, 2, 1),
        nn.ConvTranspose1d(2, 1, 3),
        nn.Bilinear(2, 3, 4),
        nn.PReLU(3),
        nn.Embedding(4, 2, padding_idx=0),
        nn.EmbeddingBag(3, 2),
    ),
    "wrapped": lambda: nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(2, 2))),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "fake quantized": lambda: torch.ao.quantization.FakeQuantize(),
    "observers": lambda: torch.ao.quantization.PerChannelMinMaxObserver(),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4]),
    "empty": nn.Sequential,
    "double": lambda: nn.Linear(2, 2).double(),
}
#: The attributes that torch adds to every module, except those that contain tensors and modules.
TORCHS_OWN = nn.Module().__dict__.keys() - {"_parameters", "_buffers", "_modules"}
#: The modules with tensors. A module without tensors has no state dict.
HAVE_TENSORS = [name for name in MODULES if name != "empty"]


def made(name: str) -> nn.Module:
    torch.manual_seed(7)
    return MODULES[name]()


def convert(*words: object) -> None:
    assert main(["convert", "-q", *map(str, words)]) == 0


def taken_out(folder: Path, obj: Any, **options: Any) -> Any:
    """Save `obj` with `options` as ``m.pt``, convert it with ``--state-dict``, and load the output with
    ``weights_only=True``.
    """
    torch.save(obj, folder / "m.pt", **options)
    convert(folder / "m.pt", folder / "out.pt", "--state-dict")
    return torch.load(folder / "out.pt", weights_only=True)


def assert_same_state(found: Any, expected: Any) -> None:
    """Assert that two state dicts have the same names, order, dtypes, layouts, values and shared storages. The tensors
    of `found` require no gradients.
    """
    assert list(found) == list(expected)
    storages: dict[int, int] = {}
    back: dict[int, int] = {}
    for name, tensor in expected.items():
        got = found[name]
        assert type(got) is torch.Tensor and not got.requires_grad and not vars(got), name
        assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(got, tensor), name
        a, b = got.untyped_storage()._cdata, tensor.untyped_storage()._cdata
        assert storages.setdefault(a, b) == b and back.setdefault(b, a) == a, name


# Comparisons with torch


@pytest.mark.parametrize("name", HAVE_TENSORS)
def test_the_state_dict_is_torchs(name: str, tmp_path: Path) -> None:
    """The ``.pt`` output equals the result of ``state_dict()``, without ``_metadata``. A new model loads it with
    ``strict=True``.
    """
    model = made(name)
    state = taken_out(tmp_path, model)
    assert type(state) is OrderedDict
    assert_same_state(state, model.state_dict())
    torch.manual_seed(8)
    fresh = MODULES[name]()
    fresh.load_state_dict(state, strict=True)
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in fresh.state_dict().items())
    assert_same_state(ckptconv.load(tmp_path / "m.pt", state_dict=True), model.state_dict())


@pytest.mark.parametrize("name", HAVE_TENSORS)
def test_safetensors_contains_the_same_tensors(name: str, tmp_path: Path) -> None:
    """A safetensors output with ``--copy-tied`` contains every tensor of the state dict. Without it, the tied names are
    restored when the file is converted to ``.pt``.
    """
    model = made(name)
    torch.save({"epoch": 1, "model": model}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "m.safetensors", "--copy-tied")
    expected = model.state_dict()
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    convert(tmp_path / "m.pt", tmp_path / "tied.safetensors")
    convert(tmp_path / "tied.safetensors", tmp_path / "back.pt")
    assert set(torch.load(tmp_path / "back.pt")) == set(expected)
    if name == "zoo":
        load_model(zoo.Net(), tmp_path / "tied.safetensors")


@pytest.mark.parametrize("name", ["everything", "shared", "traced"])
@pytest.mark.parametrize("protocol", [1, 3, 4, 5])
def test_every_protocol_gives_the_same_state_dict(name: str, protocol: int, tmp_path: Path) -> None:
    """The state dict is the same for every pickle protocol, although sets and objects are pickled in different ways."""
    model = made(name)
    assert_same_state(taken_out(tmp_path, model, pickle_protocol=protocol), model.state_dict())


@pytest.mark.untraced
@pytest.mark.parametrize("name", list(MODULES))
def test_inspect_lists_the_state_dict(name: str, tmp_path: Path) -> None:
    """`inspect` lists the class of a module, the names of its state dict in their order, and the path of each tensor.
    The rows of the table contain the same names.
    """
    model = made(name)
    torch.save({"net": model}, tmp_path / "m.pt")
    found = inspect(tmp_path / "m.pt").as_dict()
    assert found["state_dicts"] == []
    (module,) = found["modules"]
    expected = model.state_dict()
    assert module["path"] == "net"
    assert [each["name"] for each in module["tensors"]] == list(expected)
    rows = {row["path"]: row for row in found["tensors"]}
    with ckptconv.open(tmp_path / "m.pt") as file:
        for each in module["tensors"]:
            assert torch.equal(file.load(each["path"]), expected[each["name"]])
            named = rows[each["path"]]["name"]
            assert torch.equal(expected[named], expected[each["name"]])
    distinct = {(t.untyped_storage()._cdata, t.storage_offset()): t for t in expected.values()}
    assert module["parameters"] == sum(tensor.numel() for tensor in distinct.values())
    if name not in ("compiled", "traced"):
        assert module["class_name"] == f"{type(model).__module__}.{type(model).__qualname__}"


@pytest.mark.parametrize("name", HAVE_TENSORS)
def test_everything_else_is_named(name: str, tmp_path: Path) -> None:
    """Every tensor and value of the source is in the output, or the report lists it or one of its parents as left
    behind, with the number of bytes. The attributes that torch adds to every module are only counted.
    """
    model = made(name)
    torch.save({"epoch": 3, "model": model, "weight": next(model.parameters(), None)}, tmp_path / "m.pt")
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "out.pt", state_dict=True)
    found = inspect(tmp_path / "m.pt")
    (module,) = found.modules
    taken = {each.path for each in module.tensors}
    left = {each.path for each in report.left_behind if not each.why.startswith("attributes that torch adds")}
    assert {"epoch", "weight"} <= left
    assert not taken & left
    opened = _opened(tmp_path / "m.pt")
    for path in (*(row.path for row in found.tensors), *found.others):
        above = [path[:i] for i, c in enumerate(path + "/") if c in "/["]
        assert path in taken or path in opened or left & set(above) or path.rpartition("/.")[2] in TORCHS_OWN, path
    kept = sum(
        t.untyped_storage().nbytes()
        for t in {t.untyped_storage()._cdata: t for t in model.state_dict().values()}.values()
    )
    assert sum(each.nbytes for each in report.left_behind) == found.stored_nbytes - kept


def _opened(path: Path) -> set[str]:
    """Return the paths of the objects that the state dict of the checkpoint at `path` is made from."""
    with Source(path) as source:
        checkpoint = opening.read(source)
        (module,) = checkpoint.detected.modules
        return {place.path for place in checkpoint.places if id(place.node) in module.opened}


def test_report_of_what_is_left_behind(tmp_path: Path) -> None:
    """The report lists the model's own attributes one by one, and a tensor that is not a parameter with its bytes. The
    attributes that torch adds to every module share one line, unless the user changed them.
    """
    model = Everything()
    model.head.register_forward_hook(zoo.module)
    model._hooks_seen = 3
    model.tagged.training = True
    config = zoo.Config(weight=model)
    config.training = True
    torch.save(config, tmp_path / "m.pt")
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    left = {each.path: each for each in report.left_behind}
    nbytes = {".weight/.plain": 28, ".weight/._buffers/cache": 20, ".weight/.best": 16}
    assert {path: left[path].nbytes for path in nbytes} == nbytes
    own = {
        ".training",
        *(
            f".weight/{path}"
            for path in (
                "._modules/head/._forward_hooks",
                "._parameters/tagged/.training",
                "._hooks_seen",
                "._modules/head/.in_features",
            )
        ),
    }
    assert {left[path].why for path in (*own, *nbytes)} == {"not part of the state dict at .weight"}
    numbers = f"{3 * len(TORCHS_OWN) - 1} attributes of 3 modules"
    assert left[".weight"].why == f"attributes that torch adds to every module (hooks, training; {numbers})"
    assert not [path for path in left.keys() - own if path.rpartition("/.")[2] in TORCHS_OWN]


# Missing classes


def gone_class(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Save a model whose class cannot be imported, and return its state dict."""
    module = types.ModuleType("gone_models")
    source = (
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n       "
        " self.fc = torch.nn.Linear(2, 2)\n"
    )
    exec(source, module.__dict__)
    sys.modules["gone_models"] = module
    try:
        model = module.Net()
        torch.save(model, tmp_path / "m.pt")
        return model.state_dict()
    finally:
        del sys.modules["gone_models"]


def test_a_class_that_is_gone(tmp_path: Path) -> None:
    """The weights of a model are extracted although its class cannot be imported and torch cannot load the file.
    ckptconv does not even import torch.
    """
    state = gone_class(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        torch.load(tmp_path / "m.pt", weights_only=False)
    code = f"""
import sys
from ckptconv.cli.main import main
assert main(["convert", "-q", {str(tmp_path / "m.pt")!r}, {str(tmp_path / "out.pt")!r}, "--state-dict"]) == 0
assert main(["convert", "-q", {str(tmp_path / "m.pt")!r}, {str(tmp_path / "out.safetensors")!r}]) == 0
assert "torch" not in sys.modules and "gone_models" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert_same_state(torch.load(tmp_path / "out.pt", weights_only=True), state)
    assert load_file(tmp_path / "out.safetensors").keys() == state.keys()
    assert inspect(tmp_path / "m.pt").modules[0].class_name == "gone_models.Net"


def test_the_file_itself_is_retagged(tmp_path: Path) -> None:
    """Without ``--state-dict``, a module stays a module of its class, and only its location tags change."""
    model = made("everything")
    zoo.save(model, tmp_path / "m.pt", ["cuda:0"])
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "cpu.pt", map_location="cpu")
    assert not report.left_behind
    loaded = torch.load(tmp_path / "cpu.pt", weights_only=False)
    assert type(loaded) is Everything
    assert_same_state(loaded.state_dict(), model.state_dict())


# Names


def test_a_wrapped_model_and_its_prefix_in_one_command(tmp_path: Path) -> None:
    """``--strip-prefix module.`` removes the prefix from the state dict of a pickled DataParallel, in the same command
    as ``--to cpu``.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    src, dst = tmp_path / "m.pt", tmp_path / "out.pt"
    zoo.save({"model": nn.DataParallel(model)}, src, ["cuda:3"])
    convert(src, dst, "--state-dict", "--strip-prefix", "module.", "--to", "cpu")
    assert_same_state(torch.load(dst), model.state_dict())
    convert(src, tmp_path / "w.safetensors", "--strip-prefix", "module", "--add-prefix", "net.")
    assert set(load_file(tmp_path / "w.safetensors")) == {f"net.{name}" for name in model.state_dict()}
    convert(src, dst, "-f", "--state-dict", "--rename", r"^module\.(\d)", r"layer\1", "--to", "cpu")
    assert next(iter(torch.load(dst))) == "layer0.weight"


@pytest.mark.parametrize("flag", [("--strip-prefix", "module."), ("--add-prefix", "x."), ("--rename", "^", "x.")])
def test_names_are_changed_only_in_the_state_dict(flag: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    """Options that change names are refused for a pickled module, because its names are attributes. The command that
    the hint suggests succeeds, also if an optimizer with parameter names is next to the module.
    """
    model = nn.DataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), momentum=0.1).state_dict()
    for obj in (model, {"model": model, "optimizer": optimizer}):
        torch.save(obj, tmp_path / "m.pt")
        words = "convert", tmp_path / "m.pt", tmp_path / "no.pt"
        command(*words, *flag, status=1, err="--state-dict extracts its state dict")
        convert(tmp_path / "m.pt", tmp_path / "out.pt", "--state-dict", "-f", *flag)


@pytest.mark.untraced
def test_globs_match_what_inspect_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command) -> None:
    """Every name and path that `inspect` shows can be given to ``--include`` and ``--exclude``. Conversion then takes
    the same tensors that `inspect` shows.
    """
    model = made("shared")
    torch.save({"model": model}, tmp_path / "m.pt")
    names = list(model.state_dict())
    (module,) = inspect(tmp_path / "m.pt").modules
    for each in module.tensors:
        convert(tmp_path / "m.pt", tmp_path / "out.pt", "-f", "--state-dict", "--exclude", each.name)
        assert list(torch.load(tmp_path / "out.pt")) == [name for name in names if name != each.name]
        twins = [other.name for other in module.tensors if other.path == each.path]
        path = each.path.replace("[", "[[]")
        convert(tmp_path / "m.pt", tmp_path / "out.pt", "-f", "--state-dict", "--include", path)
        assert list(torch.load(tmp_path / "out.pt")) == twins
    capsys.readouterr()
    for glob in ("a.0.*", "model/._modules/a/*", "*bias"):
        shown = {row["path"] for row in command.json("inspect", tmp_path / "m.pt", "--include", glob)["tensors"]}
        convert(tmp_path / "m.pt", tmp_path / "out.pt", "-f", "--state-dict", "--include", glob)
        taken = set(torch.load(tmp_path / "out.pt"))
        assert shown == {each.path for each in module.tensors if each.name in taken}
    for name in names:  # a module that is shared under several names has one row
        for flag in ("--include", "--exclude"):
            rows = command.json("inspect", tmp_path / "m.pt", flag, name)["tensors"]
            shown = {row["path"]: row["name"] for row in rows}
            taken = {
                each.path: each.name for each in module.tensors[::-1] if (each.name == name) == (flag == "--include")
            }
            assert shown == taken
    command("inspect", tmp_path / "m.pt", "--include", "c.*", status=1)
    refused(NoMatchError, "state_dict=True", tmp_path / "m.pt", tmp_path / "no.pt", exclude="a.0.*")
    refused(
        NoMatchError, "something like model/", tmp_path / "m.pt", tmp_path / "no.pt", exclude="z.*", state_dict=True
    )


# The choice between several modules


def names_of(path: Path, **options: Any) -> list[str]:
    return list(ckptconv.load(path, state_dict=True, **options))


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        (lambda a, b: {"model": None, "ema": b, "epoch": 1}, "b"),
        (lambda a, b: {"model": a, "ema": b}, "a"),
        (lambda a, b: {"ema": b, "net": a, "loss": nn.CrossEntropyLoss()}, "a"),
        (lambda a, b: [b, 1, nn.ReLU()], "b"),
        (lambda a, b: {"hyper_parameters": {"model": b}, "state_dict": a.state_dict()}, "a"),
        (lambda a, b: {"hyper_parameters": {"net": b}, "weights_of_it": a.state_dict()}, "a"),
        (lambda a, b: {"model": a, "statistics": {"mean": torch.ones(1), "std": torch.ones(1)}}, "a"),
        (
            lambda a, b: {
                "model": a,
                "optimizer": torch.optim.Adam(a.parameters()).state_dict(),
                "rng": torch.get_rng_state(),
            },
            "a",
        ),
        (lambda a, b: zoo.Config(weight=b), "b"),
        (lambda a, b: {"first": {"inside": a}, "model": a, "other": b}, "a"),
    ],
)
def test_choice_between_several_modules(obj: Callable[[Any, Any], Any], names: str, tmp_path: Path) -> None:
    """A state dict is preferred to a module. A module with a usual name is preferred to a state dict without one.
    Modules without tensors are ignored.
    """
    a, b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    torch.save(obj(a, b), tmp_path / "m.pt")
    assert names_of(tmp_path / "m.pt") == list({"a": a, "b": b}[names].state_dict())


def test_several_modules_are_ambiguous(tmp_path: Path) -> None:
    """If there are several modules, none is chosen. The error lists them with their classes. ``--select`` extracts one
    of them as a module or as a state dict.
    """
    a, b = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    torch.save({"actor": a, "critic": b}, tmp_path / "m.pt")
    refused(
        RefusedError,
        r"actor, a torch\.nn\.modules\.linear\.Linear \(24 bytes\), critic, a .*select='actor'",
        tmp_path / "m.pt",
        tmp_path / "out.safetensors",
    )
    convert(tmp_path / "m.pt", tmp_path / "critic.pt", "--select", "critic")
    assert type(torch.load(tmp_path / "critic.pt", weights_only=False)) is nn.Sequential
    convert(tmp_path / "m.pt", tmp_path / "weights.pt", "--select", "critic", "--state-dict")
    assert_same_state(torch.load(tmp_path / "weights.pt"), b.state_dict())
    convert(tmp_path / "m.pt", tmp_path / "w.safetensors", "--select", "critic/._modules/0")
    assert set(load_file(tmp_path / "w.safetensors")) == {"weight", "bias"}
    assert {"weight", "bias"} == set(names_of(tmp_path / "m.pt", select="actor"))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("fc", "net/._modules/fc"),
        ("net.fc", "net/._modules/fc"),
        ("net/fc/0", "net/._modules/fc/._modules/0"),
        ("_modules/fc", "net/._modules/fc"),
        ("fc.0.weight", "net/._modules/fc/._modules/0/._parameters/weight"),
        ("more.0.up", "more[0]/._modules/up"),
        ("epoch.n", "epoch/n"),
    ],
)
def test_select_with_a_name_suggests_the_path(name: str, path: str, tmp_path: Path, command: Command) -> None:
    """If ``--select`` is given a name, the error suggests the path of the object with this name, and the suggested
    command succeeds. For a module it also suggests ``--state-dict``.
    """
    net = nn.ModuleDict({"fc": nn.Sequential(nn.Linear(2, 2))})
    more = [nn.ModuleDict({"up": nn.Linear(3, 3)})]
    torch.save({"net": net, "more": more, "epoch": {"n": {"of": torch.ones(1)}}}, tmp_path / "m.pt")
    said = command("convert", tmp_path / "m.pt", tmp_path / "no.pt", "--select", name, status=1).err
    assert shlex.split(said.partition(" --select ")[2])[0] == path
    convert(tmp_path / "m.pt", tmp_path / "out.pt", "--select", path)
    weights = "(and --state-dict for only its weights)"
    assert (weights in said) == isinstance(torch.load(tmp_path / "out.pt", weights_only=False), nn.Module)
    if weights in said:
        convert(tmp_path / "m.pt", tmp_path / "weights.pt", "--select", path, "--state-dict")
        assert torch.load(tmp_path / "weights.pt")


def test_select_without_a_match_lists_the_paths(tmp_path: Path) -> None:
    """If ``--select`` matches nothing, the error lists the existing paths and the command that shows the contents."""
    torch.save({"net": nn.Linear(2, 2)}, tmp_path / "m.pt")
    refused(
        NoMatchError,
        r"expected a path such as net, a .*; to see the contents: ckptconv\.inspect\('.*m\.pt'\)$",
        tmp_path / "m.pt",
        tmp_path / "no.pt",
        select="nte",
    )
    torch.save([1], tmp_path / "n.pt")
    refused(NoMatchError, r"nothing at x.*; to see the contents: ", tmp_path / "n.pt", tmp_path / "no.pt", select="x")


# Modules without a state dict, or with an incomplete one


def in_itself() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    net.add_module("deep", nn.ModuleDict({"self": net}))
    return net


def twice_in_the_next() -> nn.Module:
    """Return 30 nested lists of modules. Each contains the next one twice, so there are a billion names."""
    net: nn.Module = nn.Linear(1, 1)
    for _ in range(30):
        net = nn.ModuleList([net, net])
    return net


@pytest.mark.parametrize(
    ("make", "trouble"),
    [(in_itself, "a module contains itself, at deep.self"), (twice_in_the_next, "too many")],
    ids=["a module in itself", "a billion names"],
)
def test_modules_without_a_state_dict_are_refused(make: Callable[[], nn.Module], trouble: str, tmp_path: Path) -> None:
    """For a module without a state dict, `inspect` gives the reason, ``state_dict=True`` is refused, and other
    conversions still work.
    """
    zoo.save({"model": make()}, tmp_path / "m.pt", ["cuda:0"])
    assert trouble in str(inspect(tmp_path / "m.pt").modules[0].trouble)
    refused(
        RefusedError, f"model has no state dict: .*{trouble}", tmp_path / "m.pt", tmp_path / "out.pt", state_dict=True
    )
    convert(tmp_path / "m.pt", tmp_path / "cpu.pt", "--to", "cpu")


def test_torch_fails_for_a_module_that_contains_itself() -> None:
    """torch's ``state_dict()`` fails with a RecursionError for a module that contains itself, so there is no result to
    compare with.
    """
    with pytest.raises(RecursionError):
        in_itself().state_dict()


def test_deeply_nested_modules(tmp_path: Path) -> None:
    """The names of 300 nested modules are found without Python recursion. ``torch.save`` supports fewer levels in
    Python 3.12.
    """
    net: nn.Module = nn.Linear(1, 1)
    for _ in range(100 if sys.version_info[:2] == (3, 12) else 300):
        net = nn.Sequential(net)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        torch.save(net, tmp_path / "m.pt")
        expected = list(net.state_dict())
    finally:
        sys.setrecursionlimit(limit)
    assert names_of(tmp_path / "m.pt") == expected


def test_unknown_tensors_are_left_out_and_listed(tmp_path: Path) -> None:
    """A lazy parameter without a shape, and an entry of ``_modules`` that is not a torch module, are left out of the
    state dict. The report and `inspect` list them.
    """
    net = nn.ModuleDict({"lazy": nn.LazyLinear(3), "real": nn.Linear(2, 2)})
    net._modules["odd"] = zoo.Config(weight=torch.ones(3))  # type: ignore[assignment]
    found, report = round_trip(tmp_path, net, weights_only=True, state_dict=True)
    assert list(found) == ["real.weight", "real.bias"]
    odd = {each.path: each.nbytes for each in report.left_behind if "known kind of tensor" in each.why}
    assert odd == {"._modules/lazy/._parameters/weight": 0, "._modules/lazy/._parameters/bias": 0, "._modules/odd": 12}
    assert inspect(tmp_path / "src.pt").modules[0].unknown == ("odd", "lazy.weight", "lazy.bias")


def test_a_tensor_subclass_keeps_its_class(tmp_path: Path) -> None:
    """A tensor subclass keeps its class and its position in the state dict, also if it occurs earlier in the file."""
    net = nn.Linear(2, 2)
    net.register_buffer("odd", torch.ones(3).as_subclass(zoo.AttributedTensor))
    torch.save({"first": net.odd, "net": net, "list": [net.bias]}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "out.pt", "--state-dict")
    state = torch.load(tmp_path / "out.pt", weights_only=False)
    assert list(state) == ["weight", "bias", "odd"]
    assert type(state["odd"]) is zoo.AttributedTensor and torch.equal(torch.Tensor(state["odd"]), torch.ones(3))


def test_tensors_that_occur_before_the_module(tmp_path: Path) -> None:
    """A state dict is extracted correctly if its tensors occur in the file before the module, and torch loads it with
    ``weights_only=True``.
    """
    model = made("everything")
    obj = [list(model.parameters())[::-1], {"x": model.steps, "n": 1}, model]
    assert_same_state(taken_out(tmp_path, obj), model.state_dict())


# Quantized modules


def quantized() -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Return modules by name, each with the tensors that its state dict must contain."""
    import torch.ao.nn.quantized as nnq

    torch.manual_seed(3)
    dynamic = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)), {nn.Linear}
    )
    half = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2)), {nn.Linear}, dtype=torch.float16)
    conv, embedding = nnq.Conv2d(1, 2, 3), nnq.Embedding(4, 8)
    lstm = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.LSTM(3, 2)), {nn.LSTM})
    packed = "0._packed_params."
    return {
        "dynamic": (
            dynamic,
            {
                f"{packed}weight": dynamic[0].weight(),
                f"{packed}bias": dynamic[0].bias(),
                "1._packed_params.weight": dynamic[1].weight(),
            },
        ),
        "half": (half, {f"{packed}weight": half[0].weight().float(), f"{packed}bias": half[0].bias()}),
        "conv": (conv, {"weight": conv.weight(), "bias": conv.bias()}),
        "conv inside": (nn.ModuleDict({"c": conv}), {"c.weight": conv.weight(), "c.bias": conv.bias()}),
        "embedding": (embedding, {"_packed_params._packed_weight": embedding.weight()}),
        "lstm": (lstm, {}),
    }


@pytest.mark.skipif(not torch.backends.quantized.supported_engines, reason="this torch quantizes nothing")
@pytest.mark.parametrize("name", ["dynamic", "half", "conv", "conv inside", "embedding", "lstm"])
def test_packed_weights_are_taken(name: str, tmp_path: Path) -> None:
    """The packed weights of quantized modules are in the state dict. Quantized tensors are refused for safetensors."""
    model, expected = quantized()[name]
    state, report = round_trip(tmp_path, model, weights_only=True, state_dict=True)
    assert all(each.nbytes == 0 for each in report.left_behind)
    for key, tensor in expected.items():
        got = state.pop(key)
        assert got.dtype == tensor.dtype and torch.equal(got.dequantize(), tensor.dequantize()), key
    if name == "lstm":
        assert list(state) == [f"0._all_weight_values.0.param.{i}" for i in range(6)]
    else:
        assert not state
    if name != "half":
        refused(
            RefusedError, r"safetensors cannot store .*\(quantized\)", tmp_path / "src.pt", tmp_path / "out.safetensors"
        )


def test_output_of_inspect(tmp_path: Path, command: Command) -> None:
    """`inspect` prints the class, the sizes, the first names and the unknown tensors of a module. Attributes that torch
    adds to every module are not printed.
    """
    net = nn.ModuleDict({"real": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "lazy": nn.LazyLinear(3)})
    torch.save({"model": net, "epoch": 7}, tmp_path / "m.pt")
    lines = command("inspect", tmp_path / "m.pt").out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  module "))
    assert [line.strip().removeprefix("module        ") for line in lines[at : at + 3]] == [
        "model: a pickled torch.nn.modules.container.ModuleDict, 7 names, 15 parameters, all start with real.",
        "as a state dict: real.0.weight, real.0.bias, real.1.weight, real.1.bias, real.1.running_mean, … 2 more",
        "unknown tensors: lazy.weight, lazy.bias",
    ]
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  values")] == ["epoch = 7"]


# Hostile files

#: Changes that remove the records in which torch describes the layout of the file.
WITHOUT_LAYOUT = dict.fromkeys((".format_version", ".storage_alignment"))


@pytest.mark.untraced
def test_random_changes_are_typed_errors(tmp_path: Path) -> None:
    """If an argument of an opcode in a pickle is changed, reading and converting the file succeed or raise a
    CkptconvError.
    """
    torch.save({"model": made("shared")}, tmp_path / "m.pt")
    pickle = records_of(tmp_path / "m.pt")["data.pkl"]
    starts = [at for opcode, _, at in pickletools.genops(pickle) if opcode.name in ("BINGET", "BININT1")]
    for at in starts[:: max(1, len(starts) // 60)]:
        changed = pickle[: at + 1] + bytes([pickle[at + 1] // 2]) + pickle[at + 2 :]
        rezip(tmp_path / "m.pt", tmp_path / "x.pt", {"data.pkl": changed, **WITHOUT_LAYOUT})
        try:
            inspect(tmp_path / "x.pt")
            ckptconv.convert(tmp_path / "x.pt", tmp_path / "y.pt", state_dict=True, force=True)
        except CkptconvError:
            continue
        inspect(tmp_path / "y.pt")


def test_each_name_has_a_tensor_of_its_own(tmp_path: Path) -> None:
    """If one parameter has two names, the output contains two tensors that share a storage, like the result of
    ``state_dict()``.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    found = taken_out(tmp_path, model)
    assert found["0.weight"] is not found["1.weight"]
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()
