"""TorchScript archives: their contents are listed and their weights can be extracted, but the archives are not
changed.

The results are compared with those of ``torch.jit.load``.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import ckptconv
from ckptconv.checkpoint.index import Index
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PickledModule, read_modules
from ckptconv.checkpoint.tensor_info import TensorInfo
from ckptconv.cli.main import main
from ckptconv.errors import InputError, LimitError, MalformedError, RefusedError, UnsupportedError
from ckptconv.formats import torchscript
from ckptconv.formats.zip_archive import Archive
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import Call, Dict, Effect, Global, Graph, Node, Tuple
from ckptconv.pickles.paths import Place
from tests.support.archives import flip_bit, records_of, rezip
from tests.support.conversions import converted, read, refused, run_without_torch, unreadable
from tests.support.judge import tags_of
from tests.support.memory import memory_below
from tests.support.sampled import sampled

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Net(nn.Module):
    """A module with everything that can be in a state dict, in an order that is not alphabetical."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(4, 2)
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.lstm = nn.LSTM(4, 4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        self.again = self.blocks[0]
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.blocks[0].weight  # type: ignore[assignment]
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 4), "10": nn.Linear(4, 4)})
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.still = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("fleeting", torch.ones(3), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("sometimes", torch.ones(2))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("slice", torch.arange(10)[2:4])
        self.plain = torch.full((4,), 3.0)
        self.table = {"x": torch.ones(2), "y": torch.zeros(2)}
        self.listed = [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x)).mean(3).mean(2) + self.plain * self.table["x"].sum() + self.listed[0]
        y = self.lstm(y.unsqueeze(0))[0][0]
        y = self.blocks(y) + self.again(y) + self.tied(y) * self.scale + self.slice.sum() + self.turned.sum()
        for part in self.parts.values():
            y = part(y)
        sometimes = self.sometimes
        if sometimes is not None:
            y = y + sometimes.sum()
        return self.tail(y + self.steps + self.fleeting.sum())


Net.__annotations__["sometimes"] = Tensor | None  # torch.jit needs the type itself, not a string


class OnDevices(nn.Module):
    """A module whose code contains devices: two explicit ones, and the result of ``.cuda()``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            x = x + torch.zeros(2, device="cuda:1") + torch.ones(2, device="cuda:1") + x.cuda()
        return self.fc(x + torch.zeros(2, device="cpu"))


Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that scripts a module, or takes a script module, and saves it."""

    def write(module: nn.Module, name: str = "m.pt", extra: dict[str, str] | None = None) -> Path:
        script = module if isinstance(module, torch.jit.ScriptModule) else torch.jit.script(module.eval())
        torch.jit.save(script, str(tmp_path / name), _extra_files=extra)
        return tmp_path / name

    return write


def traced(module: nn.Module, x: Tensor) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module.eval(), x, check_trace=False)  # type: ignore[no-any-return]


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).eval()
        return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})  # type: ignore[no-any-return]


#: Modules of each kind with a state dict.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "scripted": Net,
    "traced": lambda: traced(Net(), torch.ones(1, 3, 5, 5)),
    "linear": lambda: nn.Linear(2, 3),
    "half": lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).half(),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2))),
    "quantized in part": quantized,
    "in parts": lambda: torch.jit.freeze(torch.jit.script(OnDevices().eval()), preserved_attrs=["fc"]),
}


def state_dict_of(path: Path) -> dict[str, Tensor]:
    """Return the state dict that torch loads from `path`."""
    return torch.jit.load(str(path), map_location="cpu").state_dict()  # type: ignore[no-any-return, no-untyped-call]


def weights_of(checkpoint: Checkpoint) -> dict[str, Node]:
    assert checkpoint.script_classes is not None
    return next((found.tensors for found in checkpoint.detected.modules), {})


def assert_same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Check that two state dicts have the same names in the same order, with equal types, shapes and bytes."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        left, right = (each.contiguous().reshape(-1).view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(left, right), name


# The selection of tensors


@pytest.mark.parametrize("kind", MODULES)
def test_the_state_dict_is_that_of_torch(save: Save, kind: str) -> None:
    """The names, their order, the dtypes and the shapes are those of torch's state dict: parameters and buffers, but no
    other attributes. As in torch, buffers that are not persistent are included.
    """
    path = save(MODULES[kind]())
    wanted = state_dict_of(path)
    checkpoint = read(path)
    found = weights_of(checkpoint)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        info = checkpoint.tensor_nodes[id(found[name])]
        assert (info.dtype, info.shape, info.stride) == (str(tensor.dtype)[6:], tuple(tensor.shape), tensor.stride())


def test_the_example_module_covers_the_special_cases(save: Save) -> None:
    """The state dict of the example module contains a tie, a shared module, and a name that is not an identifier. It
    does not contain plain attributes and empty parameters.
    """
    names = list(state_dict_of(save(Net())))
    assert {"again.weight", "blocks.0.weight", "tied.weight", "parts.a-b.bias", "fleeting", "slice"} < set(names)
    assert {"plain", "table.x", "absent", "nothing", "sometimes"}.isdisjoint(names)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("target", ["out.pt", "out.safetensors"])
def test_weights_are_taken_out(save: Save, tmp_path: Path, kind: str, target: str) -> None:
    """The extracted file contains the state dict from ``torch.jit.load``, with the same names, order and values."""
    path = save(MODULES[kind]())
    report = ckptconv.convert(path, tmp_path / target, state_dict=True)
    assert report.formats[0] == "TorchScript"
    wanted = state_dict_of(path)
    if target == "out.pt":
        found, tags = tags_of(tmp_path / target, weights_only=True)
        assert_same_tensors(found, wanted)
        assert set(tags) == {"cpu"}
    else:
        found = converted(tmp_path / target, tmp_path / "back.pt")
        assert_same_tensors({name: found[name] for name in wanted}, wanted)
        assert load_file(tmp_path / target).keys() == wanted.keys() - {tie[0] for tie in report.ties}


def test_edits_apply_to_what_is_taken_out(save: Save, tmp_path: Path) -> None:
    """``--to`` and ``--strip-prefix`` apply to the extracted weights."""
    path = save(traced(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)))
    assert (
        main(["convert", str(path), str(tmp_path / "o.pt"), "--state-dict", "--to", "cuda", "--strip-prefix", "0"]) == 0
    )
    found, tags = tags_of(tmp_path / "o.pt", weights_only=True)
    assert list(found) == ["weight", "bias"]
    assert tags == ["cuda:0", "cuda:0"]


def test_the_copy_is_not_a_program(save: Save, dst: Path) -> None:
    """The extracted file contains only the records of a checkpoint. The report lists the parts that were left behind,
    with their sizes.
    """
    path = save(traced(Net(), torch.ones(1, 3, 5, 5)), extra={"labels.txt": "cat\ndog"})
    report = ckptconv.convert(path, dst, state_dict=True)
    names = {name for name in records_of(dst) if not name.startswith("data/")}
    assert names == {"data.pkl", "byteorder", "version"}
    left = {each.path: each.nbytes for each in report.left_behind}
    assert left["code"] == sum(len(data) for name, data in records_of(path).items() if name.startswith("code/"))
    assert left["extra/labels.txt"] == 7
    assert left["constants"] > 0


@pytest.mark.parametrize("checked", [True, False])
def test_deflated_storages_are_inflated_on_the_way(save: Save, dst: Path, checked: bool) -> None:
    """Weights are extracted from an archive whose records are deflated, with and without checksums."""
    path = save(nn.Linear(100, 100))
    rezip(path, path, method=zipfile.ZIP_DEFLATED)
    if not checked:
        path.write_bytes(without_checksums(path.read_bytes()))
    assert_same_tensors(converted(path, dst, state_dict=True, verify=True), state_dict_of(path))
    with zipfile.ZipFile(dst) as archive:
        assert [bool(info.CRC) for info in archive.infolist()] == [checked] * len(archive.namelist())
        assert not checked or archive.testzip() is None


def without_checksums(data: bytes) -> bytes:
    """Return `data`, an archive that Python's zipfile wrote, with every checksum set to zero."""
    whole = bytearray(data)
    for signature, at in ((b"PK\x03\x04", 14), (b"PK\x01\x02", 16)):
        for match in re.finditer(re.escape(signature), data):
            whole[match.start() + at : match.start() + at + 4] = bytes(4)
    return bytes(whole)


# Refused conversions


@pytest.mark.parametrize("flags", [[], ["--to", "cpu"], ["--format", "legacy"], ["--strip-prefix", "x."]])
def test_the_archive_itself_is_not_changed(
    save: Save, dst: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion of the archive itself is refused, also if only devices, format or names change. The error gives the
    reason and both alternatives. Nothing is written.
    """
    path = save(nn.Linear(2, 2))
    assert main(["convert", str(path), str(dst), *flags]) == 1
    said = capsys.readouterr().err
    assert "a TorchScript archive is a program, and the devices in its code" in said
    assert f'torch.jit.load("{path}", map_location="cpu")' in said
    assert "--state-dict extracts its weights" in said
    assert [each.name for each in dst.parent.iterdir()] == ["m.pt"]


def test_the_hint_for_python_names_the_keyword(save: Save, dst: Path) -> None:
    """The hint for callers from Python names the keyword, not the command-line option."""
    refused(RefusedError, "state_dict=True extracts its weights", save(nn.Linear(2, 2)), dst, map_location="cpu")


@pytest.mark.parametrize("target", ["o.pt", "o.safetensors"])
def test_a_frozen_model_has_no_state_dict(save: Save, tmp_path: Path, target: str) -> None:
    """The weights of a frozen model are constants without names. ``inspect`` reports this with their size, and
    extraction is refused for this reason.
    """
    path = save(torch.jit.freeze(torch.jit.script(nn.Linear(30, 10).eval())))
    assert not state_dict_of(path)
    notes = ckptconv.inspect(path).notes
    assert any("no parameters and no buffers" in note and "torch.jit.freeze" in note for note in notes)
    assert any("2 tensors in constants.pkl, 1,240 bytes, on cpu ×2" in note for note in notes)
    refused(RefusedError, r"no parameters and no buffers.*torch\.jit\.freeze", path, tmp_path / target, state_dict=True)


@pytest.mark.filterwarnings("ignore")
def test_a_model_optimized_for_inference(save: Save) -> None:
    """A model optimized for inference has no weights, as in torch."""
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval())
    path = save(torch.jit.optimize_for_inference(script))
    assert not state_dict_of(path)
    assert not weights_of(read(path))


@pytest.mark.filterwarnings("ignore:Lite Interpreter")
def test_archives_of_the_lite_interpreter(tmp_path: Path) -> None:
    """A file for the lite interpreter contains bytecode in addition to the code. Its weights are found and extracted as
    usual.
    """
    script = torch.jit.script(nn.Linear(2, 2))
    script._save_for_lite_interpreter(str(tmp_path / "m.ptl"))
    assert list(weights_of(read(tmp_path / "m.ptl"))) == ["weight", "bias"]
    report = ckptconv.convert(tmp_path / "m.ptl", tmp_path / "o.pt", state_dict=True)
    assert "bytecode" in {left.path for left in report.left_behind}


# Reports


def test_inspect_names_the_format_and_the_devices(save: Save, capsys: pytest.CaptureFixture[str]) -> None:
    """``inspect`` reports the format, the tensors with dtype, shape and device, and the devices in the code with their
    number and first occurrence. The JSON output contains the format and a note about the devices.
    """
    path = save(OnDevices())
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{path}: TorchScript, " in said.splitlines()[0]
    assert re.search(r"^fc\.weight\tfloat32\t2×2\tcpu", said, re.MULTILINE)
    assert (
        "devices in its code, which map_location does not change:  cuda:1 ×2 (first in"
        " code/__torch__/tests/unit/formats/test_torchscript.py), " in said
    )
    assert "cuda ×1 (" in said and "cpu ×1 (" in said
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "TorchScript"
    assert any("cuda:1 ×2" in note for note in found["notes"])


def test_no_map_location_changes_the_devices_in_the_code(save: Save) -> None:
    """torch does not change the devices in the code when it loads with ``map_location``, as the note states."""
    loaded = torch.jit.load(str(save(OnDevices())), map_location="cpu")  # type: ignore[no-untyped-call]
    assert loaded.code.count('torch.device("cuda:1")') == 2
    assert "torch.cuda(" in loaded.code


def test_the_devices_of_constants_are_named(save: Save) -> None:
    """A note lists the tags in constants.pkl, here those of a model that was traced on a GPU."""
    path = save(traced(Net(), torch.ones(1, 3, 5, 5)))
    records = records_of(path)
    n = len([name for name in records if name.startswith("constants/")])
    rezip(path, path, {"constants.pkl": with_tag(records["constants.pkl"])})
    (note,) = [note for note in ckptconv.inspect(path).notes if "constants.pkl" in note]
    assert f"{n} tensors in constants.pkl, " in note and f"on cuda:3 ×{n}" in note


def with_tag(pickle: bytes) -> bytes:
    return pickle.replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:3")


def test_a_program_without_devices_has_no_note_on_devices(save: Save) -> None:
    """A program without devices in its code has no notes."""
    assert ckptconv.inspect(save(nn.Linear(2, 2))).notes == ()


def test_single_tensors_are_read(save: Save) -> None:
    """``ckptconv.open`` loads single tensors of a program, also attributes that are not parameters."""
    module = Net()
    with ckptconv.open(save(module)) as file:
        assert file.format == "TorchScript"
        assert torch.equal(file.load(".conv/.weight"), module.conv.weight)
        assert torch.equal(file.load(".plain"), module.plain)


def test_torch_is_not_imported(save: Save, dst: Path) -> None:
    """Inspecting a program and extracting its weights work without torch."""
    path = save(nn.Linear(2, 2))
    for words in (["inspect", path], ["convert", path, dst, "--state-dict"]):
        run_without_torch("from ckptconv.cli.main import main; main(sys.argv[1:])", *words)


def test_every_command_of_the_diagnosis_runs(save: Save, here: Path) -> None:
    """Every command of the diagnosis works for an archive with the tags of an absent GPU, a tie, and a wrapper's
    prefix. The output of each command no longer has the finding.
    """
    wrapped = nn.ModuleDict({"module": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    wrapped["module"][1].weight = wrapped["module"][0].weight  # type: ignore[index]
    path = save(torch.jit.script(wrapped))
    rezip(path, path, {"data.pkl": with_tag(records_of(path)["data.pkl"])})
    findings = ckptconv.inspect(path).findings
    assert {"code", "device", "prefix", "ties"} <= {finding.kind for finding in findings}
    (code,) = [finding for finding in findings if finding.kind == "code"]
    assert "it is a TorchScript archive, which torch.jit.load loads and torch.load does not" in code.text
    for finding in findings:
        assert finding.command, finding
        words = shlex.split(finding.command)[1:]
        assert main([*words, "--force"]) == 0, finding
        kinds = {after.kind for after in ckptconv.inspect(words[2]).findings}
        assert finding.kind not in kinds and "code" not in kinds
    remedy = ckptconv.inspect(path).remedy
    assert remedy and main(shlex.split(remedy)[1:]) == 0
    assert ckptconv.inspect(shlex.split(remedy)[3]).loads_here


def test_a_frozen_model_has_no_command(save: Save) -> None:
    """The finding for a frozen model has no command, because no conversion would help ``torch.load``."""
    found = ckptconv.inspect(save(torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval()))))
    assert found.loads_here is False
    assert [finding.command for finding in found.findings] == [None]
    assert "it has no state dict" in found.findings[0].text


# The corpus


def test_every_archive_of_the_corpus(corpus: Path, dst: Path, safe: Path) -> None:
    """Archives from torch 1.3 to 2.5 give the same tensors as torch. An archive from torch 1.0 is refused with its
    version, and torch refuses it too.
    """
    taken = 0
    for pattern in ("**/silero_vad.jit", "**/foo~ae7b294.pt", "**/dummy.pt", "**/foo4.pt"):
        (path,) = corpus.glob(pattern)
        wanted = state_dict_of(path)
        assert list(weights_of(read(path))) == list(wanted), path
        if wanted:
            assert_same_tensors(converted(path, dst, state_dict=True), wanted)
            assert_same_tensors(dict(sorted(converted(path, safe).items())), dict(sorted(wanted.items())))
            taken += len(wanted)
    assert taken > 30
    (old,) = corpus.glob("*tch-rs/tests/foo.pt")
    unreadable(old, UnsupportedError, r"a TorchScript archive from torch before 1\.3")
    with pytest.raises(RuntimeError, match="Legacy model format"):
        state_dict_of(old)


# Hostile archives


def lying(path: Path, old: bytes, new: bytes) -> Path:
    """Replace `old` with `new` in the code of the program at `path`, and return `path`."""
    code = {name: data for name, data in records_of(path).items() if name.endswith(".py")}
    assert any(old in data for data in code.values())
    return rezip(path, path, {name: data.replace(old, new) for name, data in code.items()})


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (b'["weight", "bias", ]', b'["weight", "no such", "training", ]', ["0.weight"]),
        (b'["weight", "bias", ]', b'["bias", "weight", "bias", ]', ["0.weight", "0.bias"]),
        (b"class Linear(Module)", b"class Linear", []),
        (b"class Linear(Module)", b"class Other(Module)", []),
        (b"class Sequential(Module)", b"class Sequential(NamedTuple)", []),
        (b"  __buffers__ = []\n  weight", b'  __buffers__ = ["weight", "bias", ]\n  weight', ["0.weight", "0.bias"]),
        (b'["weight", "bias", ]', b'["\\167eight", "bi\\141s", ]', ["0.weight", "0.bias"]),
        (b'["weight", "bias", ]', b'["weight", "bias"', []),
        (  # a buffer that can be None is not in the state dict, also if its name is not an identifier
            b'["weight", "bias", ]\n  __buffers__ = []\n  weight : Tensor',
            b'["bias", ]\n  __buffers__ = ["weight", ]\n  __annotations__["weight"] = Optional[Tensor]',
            ["0.bias"],
        ),
        (  # the lists of one class do not apply to the next class
            b'class Linear(Module):\n  __parameters__ = ["weight", "bias", ]',
            b'class Pair:\n  __parameters__ = ["bias", ]\nclass Linear(Module):\n  __parameters__ = ["weight", ]',
            ["0.weight"],
        ),
    ],
)
def test_wrong_lists_name_only_existing_tensors(save: Save, old: bytes, new: bytes, names: list[str]) -> None:
    """Attributes that are missing or not tensors, and classes that are missing or not modules, are skipped. The other
    tensors are found.
    """
    path = lying(save(nn.Sequential(nn.Linear(2, 2))), old, new)
    assert list(weights_of(read(path))) == names


@pytest.mark.parametrize("names", [["code/x.py"], ["code/x.py", "code/y.py"]], ids=["one file", "two files"])
def test_a_bomb_of_code_is_refused_before_it_is_inflated(save: Save, names: list[str]) -> None:
    """Code that inflates from kilobytes to megabytes is refused before it is inflated. The limit is that of all code
    files together.
    """
    path = save(nn.Linear(2, 2))
    spaces = b" " * (LIMITS.script_bytes // len(names) + 1)
    rezip(path, path, dict.fromkeys(names, spaces), method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with memory_below(4 << 20):
        unreadable(path, LimitError, "too much code")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("record", [r"code/.*\.py$", r"constants\.pkl$"])
def test_damage_is_found(save: Save, method: int, record: str) -> None:
    """A flipped bit in the code or in the constants is found, stored or deflated, because each record has a
    checksum.
    """
    path = save(traced(Net(), torch.ones(1, 3, 5, 5)))
    archive = read(rezip(path, path, method=method)).container
    assert isinstance(archive, Archive)
    member = next(member for name, member in archive.names.items() if re.match(record, name))
    flip_bit(path, (member.data_offset or 0) + member.stored_size // 2)
    unreadable(path, MalformedError)


@pytest.mark.untraced
@pytest.mark.parametrize("name", ["code/__torch__.py", "constants.pkl", "data.pkl"])
def test_any_cut_of_a_record_ends_in_a_typed_error_or_in_less(save: Save, tmp_path: Path, name: str) -> None:
    """An archive with a truncated record is refused or gives no more tensors than before. Other errors do not occur."""
    path = save(traced(Net(), torch.ones(1, 3, 5, 5)))
    records = records_of(path)
    record = next(each for each in records if each.startswith(name.removesuffix(".py")))
    data = records[record]
    whole = len(weights_of(read(path)))
    for size in range(0, len(data), 1 + len(data) // 40):
        cut = rezip(path, tmp_path / "cut.pt", {record: data[:size]})
        with suppress(InputError):
            assert len(weights_of(read(cut))) <= whole


def module(cls: str, **attributes: Any) -> Call:
    """Return an object of the class `cls` with `attributes`, in the form of a pickle."""
    call = Call("NEWOBJ", Global("__torch__", cls), Tuple([]))
    state = Dict()
    state.add(Effect("SETITEMS", [each for pair in attributes.items() for each in pair], None))
    call.add(Effect("BUILD", [state], None))
    return call


CLASSES = {"__torch__.M": (["w"], ["b"])}


def module_of(root: Call, *tensors: Call) -> PickledModule:
    """Return the module that is found in an archive with the root `root` and the `tensors`."""
    info = TensorInfo("", None, "strided", "float32", (), (), 0, "cpu", 4, None, False, False, True)
    index = Index(Graph(root, 2, 0, frozenset(), [], [], [], [], set()), Place(None, "", root, 0), [], "m.pt")
    vars(index)["every_place"] = [index.root]
    vars(index)["_found"] = {}, {id(each): info for each in tensors}  # more tensors than the archive could have
    return read_modules(index, CLASSES)[0]


def tensor() -> Call:
    return Call("REDUCE", Global("torch._utils", "_rebuild_tensor_v2"), Tuple([]))


def add(to: Call, name: str, value: Node) -> None:
    state = to.effects[0].values[0]
    assert isinstance(state, Dict)
    state.add(Effect("SETITEM", [name, value], None))


def test_listed_parameters_that_are_not_tensors_are_skipped() -> None:
    """A listed parameter that is a module or a list instead of a tensor is skipped."""
    w = tensor()
    root = module("M", w=module("M", w=w), b=Tuple([]))
    assert module_of(root, w).names() == ["w.w"]


def test_modules_that_contain_each_other() -> None:
    """Modules that contain themselves, directly or through a part, are reported without an endless walk."""
    w = tensor()
    alone = module("M", w=w)
    add(alone, "me", alone)
    inner = module("M", w=w)
    outer = module("M", inner=inner)
    add(inner, "outer", outer)
    for root in (alone, outer):
        assert "contains itself" in str(module_of(root, w).trouble)


def test_modules_that_double_at_each_level_end() -> None:
    """A module that contains the next one twice, at forty levels, would have a trillion names. It is refused."""
    w = tensor()
    at = module("M", w=w)
    for _ in range(40):
        at = module("M", left=at, right=at)
    assert "too many" in str(module_of(at, w).trouble)


def test_a_long_chain_of_modules_ends() -> None:
    """A chain of 500 modules is named. A chain of 20,000 modules, deeper than any recursion, is refused without a
    crash.
    """
    w = tensor()
    for levels in (500, 20_000):
        at = module("M", w=w)
        for _ in range(levels):
            at = module("M", n=at)
        found = module_of(at, w)
        assert (found.names()[0] == "n." * levels + "w") if levels == 500 else "too many" in str(found.trouble)


def test_long_names_are_not_multiplied() -> None:
    """A name of 60,000 letters at each of many levels is refused before the names are built."""
    w = tensor()
    at = module("M", w=w)
    for _ in range(LIMITS.nesting - 1):
        at = module("M", **{"n" * 60_000: at})
    assert "too many" in str(module_of(at, w).trouble)


def test_one_state_of_many_objects_is_read_once() -> None:
    """Thousands of objects that share a dict of thousands of attributes are refused without reading the dict again for
    each.
    """
    first = module("M", **{f"n{i}": i for i in range(20_000)})
    state = first.effects[0].values[0]
    others = []
    for _ in range(20_000):
        call = Call("NEWOBJ", Global("__torch__", "M"), Tuple([]))
        call.add(Effect("BUILD", [state], None))
        others.append(call)
    root = module("M", **{f"m{i}": each for i, each in enumerate(others)})
    assert "too many" in str(module_of(root).trouble)


def test_search_in_long_code_is_fast() -> None:
    """Megabytes of code that would be slow for a backtracking search are read in little time: strings without an end,
    long lists, and 100,000 attributes.
    """
    many = b"".join(b"  a%d : int\n" % i for i in range(100_000))
    listed = b", ".join(b'"a%d"' % i for i in range(100_000))
    for text in (
        b'class M(Module):\n  __parameters__ = ["' + b'\\"' * 2_000_000 + b"]\n",
        b"class M(Module):\n  __buffers__ = [" + listed + b"]\n" + many,
        b'class M(Module):\n  __annotations__["' + b"\\\\" * 2_000_000 + b"\n",
        b"class M(Module):\n" + b"  __parameters__ = [" + b"]" * 2_000_000 + b"x\n",
        b'torch.device("' * 300_000,
    ):
        found = torchscript._classes("__torch__", text, iter)
        assert found.get("__torch__.M", ([], [])) == ([], [])
        assert not torchscript._devices(text, iter)


def test_a_shared_module_is_accepted() -> None:
    """A layer with 24 names, as in models with shared layers, is accepted."""
    w = tensor()
    layer = module("M", w=w)
    root = module("M", **{f"layer{i}": layer for i in range(24)})
    assert module_of(root, w).names() == [f"layer{i}.w" for i in range(24)]


def test_a_torch_zip_with_constants_is_a_program_whatever_its_root(src: Path, dst: Path) -> None:
    """A torch zip with the record constants.pkl is a program, because torch recognizes programs by this record. The
    dict of tensors next to it is not retagged.
    """
    torch.save({"w": torch.ones(3)}, src)
    rezip(src, src, {"constants.pkl": b"\x80\x02)."})
    assert read(src).format == torchscript.NAME
    refused(RefusedError, "is a program", src, dst, map_location="cpu")


@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.parametrize(
    "line",
    sampled(
        [b"class X(Module):\n", b'torch.device("cuda:0")\n', b"  a : i\n", b'  __parameters__ = ["a", "b", "c"]\n']
    ),
)
def test_code_with_too_many_statements_is_refused(save: Save, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code with more classes, devices, attributes or names than any model has is refused without much memory. Code that
    deflates too well is refused too.
    """
    limits = replace(LIMITS, script_words=100_000)
    monkeypatch.setattr(torchscript, "LIMITS", limits)
    path = save(torch.jit.script(nn.Linear(2, 2)))
    many = line * (limits.script_words + 1)
    rezip(path, path, {name: data + many for name, data in records_of(path).items() if name.endswith(".py")})
    with memory_below(60_000_000):
        unreadable(path, LimitError, "has too many names")
    rezip(path, path, method=zipfile.ZIP_DEFLATED)
    unreadable(path, LimitError, "too large")
