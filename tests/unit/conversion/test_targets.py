"""Tests of the choice of output paths and formats for given inputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.targets import find_request, find_target, list_requests, refuse_one_place
from ckptconv.errors import InputError, RefusedError, UsageError
from ckptconv.formats.writers import usual_format
from ckptconv.hints import Message, python_words
from tests.support import zoo
from tests.support.command import Command
from tests.support.conversions import refused
from tests.support.paths import fill


@pytest.mark.parametrize(
    ("name", "format", "expected"),
    [
        ("a.pt", None, "pt"),
        ("a.pth.tar", None, "pt"),
        ("pytorch_model.bin", None, "pt"),
        ("a.safetensors", None, "safetensors"),
        ("A.SAFETENSORS", None, "safetensors"),
        ("a", None, "pt"),
        ("a.weights", None, "pt"),
        ("a.pkl", None, "pt"),
        ("a.weights", "safetensors", "safetensors"),
        ("a", "safetensors", "safetensors"),
        ("a.safetensors", "safetensors", "safetensors"),
        ("a.ckpt", "pt", "pt"),
        ("a.pth.tar", "legacy", "legacy"),
        ("a.pkl", "legacy", "legacy"),
        ("a.pkl", "pickle", "pickle"),
        ("a.PICKLE", "pickle", "pickle"),
        ("a.weights", "pickle", "pickle"),
        ("a", "legacy", "legacy"),
        ("a.safetensors.bak", None, "safetensors"),
        ("a.safetensors.pt", None, "pt"),
        ("a.pt.new", None, "pt"),
        ("a.v2", None, "pt"),
        ("a.0.5", None, "pt"),
        ("a.pth.tar.1", None, "pt"),
        ("a.gguf.pt", None, "pt"),
        ("a.gguf", "pt", "pt"),
        ("a.safetensor", "safetensors", "safetensors"),
    ],
)
def test_format_by_request_or_suffix(tmp_path: Path, name: str, format: str | None, expected: str) -> None:
    """The requested format is used. Without one, the last known suffix of the name decides, and the default is pt. A
    name with an unknown suffix can have any format.
    """
    path, meant = find_target(Path("in.pt"), tmp_path / name, format)
    assert (path, meant or usual_format(name, "torch zip")) == (tmp_path / name, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.pkl", "pickle"), ("a.PICKLE", "pickle"), ("a.pt", "pt"), ("a", "pt"), ("a.safetensors", "safetensors")],
)
def test_a_plain_pickle_stays_one_with_its_suffix(tmp_path: Path, name: str, expected: str) -> None:
    """A plain pickle stays a plain pickle if the output has the suffix of one. Another input becomes a pickle only if
    the format is requested.
    """
    assert usual_format(name, "pickle") == expected
    assert usual_format(name, "torch legacy") == ("pt" if expected == "pickle" else expected)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.safetensors", "pt"),
        ("a.safetensors", "pickle"),
        ("a.safetensors", "legacy"),
        ("a.bin", "safetensors"),
        ("a.pkl", "safetensors"),
        ("a.pt", "pickle"),
        ("a.pt", "gguf"),
    ],
)
def test_contradictions_are_usage_errors(tmp_path: Path, name: str, format: str) -> None:
    """A format that contradicts the suffix, or that does not exist, is a usage error."""
    with pytest.raises(UsageError):
        find_target(Path("in.pt"), tmp_path / name, format)


@pytest.mark.parametrize(
    ("src", "format", "name"),
    [
        ("in.pt", None, "in.pt"),
        ("in.pt", "pt", "in.pt"),
        ("in.pth.tar", "safetensors", "in.safetensors"),
        ("pytorch_model.bin", "safetensors", "model.safetensors"),
        ("pytorch_model-00001-of-00002.bin", "safetensors", "model-00001-of-00002.safetensors"),
        ("model.safetensors", "pt", "pytorch_model.bin"),
        ("model-00001-of-00002.safetensors", "pt", "pytorch_model-00001-of-00002.bin"),
        ("vae.safetensors", "pt", "vae.pt"),
        ("modelzoo.safetensors", "pt", "modelzoo.pt"),
        ("diffusion_pytorch_model.safetensors", "pt", "diffusion_pytorch_model.bin"),
        ("adapter_model.bin", "safetensors", "adapter_model.safetensors"),
        ("weights", "safetensors", "weights.safetensors"),
        ("model.safetensors", None, "model.safetensors"),
        ("in.pt", "legacy", "in.pt"),
        ("in.pth.tar", "legacy", "in.pth.tar"),
        ("in.pkl", "legacy", "in.pkl"),
        ("in.pkl", "pickle", "in.pkl"),
        ("in.pkl", "pt", "in.pkl"),
        ("in.pickle", None, "in.pickle"),
        ("in.pth", "pickle", "in.pkl"),
        ("pytorch_model.bin", "pickle", "pytorch_model.pkl"),
        ("pytorch_model-00001-of-00002.bin", "pickle", "pytorch_model-00001-of-00002.pkl"),
        ("model.safetensors", "legacy", "pytorch_model.bin"),
        ("weights", "pickle", "weights.pkl"),
        ("in.pt.old", None, "in.pt.old"),
        ("in.pt.old", "safetensors", "in.safetensors"),
        ("in.gguf", None, "in.gguf"),
    ],
)
def test_in_a_folder_the_name_follows_the_format(tmp_path: Path, src: str, format: str | None, name: str) -> None:
    """In a folder, the output keeps the stem of the input, and its suffix follows the format. A name of the Hub becomes
    its name for the other format. A path with a slash at the end is a folder.
    """
    for folder in (str(tmp_path), f"{tmp_path}/new/"):
        path, found = find_target(Path(src), folder, format)
        assert path == Path(folder) / name
        assert found == (format or ("safetensors" if name.endswith("safetensors") else None))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.safetensor", "did you mean .*a.safetensors.*--format pt"),
        ("a.safetnesors", "did you mean .*a.safetensors"),
        ("a.safetensr.bak", "did you mean .*a.safetensors.bak"),
        ("a.ckp", "did you mean .*a.ckpt"),
        ("a.ptt", "did you mean .*a.pt"),
        ("a.tp", "did you mean .*a.pt"),
        ("a.gguf", "llama.cpp.*--format pt"),
        ("a.H5", "Keras"),
        ("a.pt.gz", "a compressor"),
    ],
)
def test_suffixes_of_other_files(tmp_path: Path, name: str, words: str) -> None:
    """An output with the suffix of another program, or with a misspelled suffix, is refused. It is accepted if the
    input has the same suffix.
    """
    for src in ("in.pt", str(tmp_path)):
        with pytest.raises(UsageError, match=words):
            list_requests([src], tmp_path / name)
    assert find_target(Path(f"in{Path(name).suffix}"), tmp_path / f"a{Path(name).suffix}", None)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("-", "no checkpoint is written to standard output"),
        ("hf://me/model/a.pt", "hf://me/model/a.pt: a URL"),
        (Path("https://host/a.pt"), "https://host/a.pt: a URL"),
    ],
)
def test_outputs_that_are_not_paths(path: str | Path, words: str) -> None:
    """Standard output and URLs are refused as outputs."""
    with pytest.raises(UsageError, match=words):
        list_requests(["in.pt"], path)


def test_an_empty_output_path() -> None:
    """An empty output path is refused, because it would mean the working directory."""
    with pytest.raises(UsageError, match="empty"):
        find_target(Path("a.pt"), "", None)


# Several files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
CHUNKS = (".metadata", "__0_0.distcp")


@pytest.fixture
def tree(here: Path) -> Path:
    """Create a file and folders of each kind in the working directory, and return it."""
    fill(
        here,
        "a.pt",
        "run/x.pt",
        "run/deep/model.safetensors",
        "run/config.json",
        "run/.git/x.pt",
        *(f"hub/{name}" for name in (*SHARDS, "config.json", "optimizer.pt")),
        *(f"dcp/{name}" for name in CHUNKS),
        *(f"all/dcp/{name}" for name in CHUNKS),
        *(f"all/hub/{name}" for name in SHARDS),
        "all/hub/below/y.pt",
        "all/z.pt",
        "parts/shard-00001-model-00001-of-00001.safetensors",
        "empty/config.json",
        "there/",
    )
    return here


def listed(srcs: str, dst: str, **keywords: Any) -> list[str]:
    """Return each request as ``src kind dst``, with a slash at the end if the output is a folder of shards."""
    return [
        f"{item.src} {item.kind} {item.dst}{'/' if item.is_folder else ''}"
        for item in list_requests(srcs.split(), dst, output=OutputOptions(**keywords)).requests
    ]


TABLE: list[tuple[str, str, dict[str, Any], list[str]]] = [
    # a file
    ("a.pt", "b.pt", {}, ["a.pt file b.pt"]),
    ("a.pt", "there", {}, ["a.pt file there/a.pt"]),
    ("a.pt", "new/", {"format": "safetensors"}, ["a.pt file new/a.safetensors"]),
    ("a.pt", "new", {}, ["a.pt file new"]),
    ("missing.pt", "b.pt", {}, ["missing.pt file b.pt"]),
    ("a.pt", "new", {"max_shard_size": 1}, ["a.pt file new/"]),
    ("a.pt", "there", {"max_shard_size": 1}, ["a.pt file there/"]),
    # one checkpoint in several files
    ("hub", "b.safetensors", {}, ["hub shards b.safetensors"]),
    ("hub", "b", {}, ["hub shards b/"]),
    ("hub", "there", {}, ["hub shards there/"]),
    ("hub", "hub", {}, ["hub shards hub/"]),
    (f"hub/{SHARDS[2]}", "b.pt", {}, [f"hub/{SHARDS[2]} shards b.pt"]),
    (f"hub/{SHARDS[2]}", "b", {}, [f"hub/{SHARDS[2]} shards b/"]),
    ("dcp", "b.pt", {}, ["dcp dcp b.pt"]),
    ("dcp", "b", {}, ["dcp dcp b/dcp.pt"]),
    ("dcp", "there", {"format": "safetensors"}, ["dcp dcp there/dcp.safetensors"]),
    ("dcp", "b", {"max_shard_size": 1}, ["dcp dcp b/"]),
    ("parts", "b", {}, ["parts dcp b/parts.safetensors"]),
    ("parts", "b", {"format": "pt"}, ["parts dcp b/parts.pt"]),
    # a folder with several
    ("run", "new", {}, ["run/deep/model.safetensors file new/deep/model.safetensors", "run/x.pt file new/x.pt"]),
    (
        "run",
        "there",
        {"format": "pt"},
        ["run/deep/model.safetensors file there/deep/pytorch_model.bin", "run/x.pt file there/x.pt"],
    ),
    ("run/", "run", {}, ["run/deep/model.safetensors file run/deep/model.safetensors", "run/x.pt file run/x.pt"]),
    (
        "run",
        "new",
        {"copy_others": True},
        [
            "run/config.json other new/config.json",
            "run/deep/model.safetensors file new/deep/model.safetensors",
            "run/x.pt file new/x.pt",
        ],
    ),
    (
        "run",
        "new",
        {"max_shard_size": 1},
        ["run/deep/model.safetensors file new/deep/model/", "run/x.pt file new/x/"],
    ),
    ("all", "new", {}, ["all/dcp dcp new/dcp.pt", "all/hub shards new/hub/", "all/z.pt file new/z.pt"]),
    (
        "all",
        "new",
        {"max_shard_size": 1},
        ["all/dcp dcp new/dcp/", "all/hub shards new/hub/", "all/z.pt file new/z/"],
    ),
    # several
    (
        "a.pt run hub dcp",
        "new",
        {},
        [
            "a.pt file new/a.pt",
            "run/deep/model.safetensors file new/run/deep/model.safetensors",
            "run/x.pt file new/run/x.pt",
            "hub shards new/hub/",
            "dcp dcp new/dcp.pt",
        ],
    ),
    (f"a.pt hub/{SHARDS[2]}", "there", {}, ["a.pt file there/a.pt", f"hub/{SHARDS[2]} shards there/model/"]),
]


@pytest.mark.parametrize(("srcs", "dst", "keywords", "expected"), TABLE)
def test_outputs_of_inputs(tree: Path, srcs: str, dst: str, keywords: dict[str, Any], expected: list[str]) -> None:
    """The table lists the outputs for each input. A folder of many checkpoints becomes a folder with the same tree, and
    several inputs are written under their names, as ``cp -r`` does.
    """
    assert listed(srcs, dst, **keywords) == expected


@pytest.mark.parametrize(
    ("srcs", "dst", "keywords", "error", "words"),
    [
        (
            "a.pt run",
            "b.pt",
            {},
            UsageError,
            r"need a folder as the output \(expected a folder, or a path without a suffix\)",
        ),
        ("a.pt run", "a.pt", {}, UsageError, "need a folder"),
        ("a.pt", "b.pt", {"max_shard_size": 1}, UsageError, "folder"),
        ("hub", "b.safetensors", {"format": "pt"}, UsageError, "the suffix means"),
        ("run", "run/out", {}, UsageError, "inside the input"),
        ("hub", "hub/out", {}, UsageError, "inside the input"),
        ("hub a.pt", "hub", {}, UsageError, "inside the input"),
        ("dcp", "dcp", {}, UsageError, "among the files of the input"),
        ("dcp", "dcp/.metadata", {}, UsageError, "among the files of the input"),
        ("dcp", "dcp/__0_0.distcp", {"format": "pt"}, UsageError, "among the files of the input"),
        ("dcp", "dcp/__7_0.distcp", {"format": "pt"}, UsageError, "inside the input"),
        ("hub", "hub/model-00001-of-00002.safetensors", {}, UsageError, "among the files of the input"),
        ("dcp", "dcp", {"max_shard_size": 1}, UsageError, "among the files of the input"),
        ("parts", "parts", {}, UsageError, r"ckptconv convert parts parts\.pt"),
        ("a.pt", "b.pt", {"copy_others": True}, UsageError, "needs a folder as the input"),
        ("a.pt run/x.pt", "new", {"copy_others": True}, UsageError, "needs a folder as the input"),
        ("hub", "b.pt", {"copy_others": True}, UsageError, "--copy-others needs a folder"),
        (f"hub/{SHARDS[2]}", "b.pt", {"copy_others": True}, UsageError, "--copy-others needs a folder"),
        ("run", "b.pt", {}, InputError, "the checkpoint"),
        ("empty", "new", {}, InputError, "it contains no checkpoint"),
        ("empty", "new", {"copy_others": True}, InputError, "it contains no checkpoint"),
        ("a.pt ./a.pt", "new", {}, RefusedError, "a.pt and a.pt would both be written to this path"),
    ],
)
def test_contradictory_inputs_and_outputs(
    tree: Path, srcs: str, dst: str, keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Contradictory inputs and outputs are refused before anything is written."""
    with pytest.raises(error, match=words):
        list_requests(srcs.split(), dst, output=OutputOptions(**keywords))


def test_two_inputs_with_the_same_output(tree: Path) -> None:
    """If two inputs have the same output, or one output is within the output folder of another, the error names both
    inputs.
    """
    (tree / "run" / "x.bin").touch()
    with pytest.raises(RefusedError, match=r"run/x\.bin and run/x\.pt would both be written to this path") as caught:
        list_requests(["run"], "new", output=OutputOptions(format="safetensors"))
    assert str(caught.value).startswith("new/x.safetensors: ")
    (tree / "run" / "x").mkdir()
    (tree / "run" / "x" / "y.pth").touch()
    with pytest.raises(RefusedError, match=r"run/x\.bin and run/x\.pt would both be written to this path"):
        list_requests(["run"], "new", output=OutputOptions(max_shard_size=1))
    (tree / "run" / "x.bin").unlink()
    with pytest.raises(RefusedError, match=r"run/x/y\.pth would be written into the output folder of run/x\.pt"):
        list_requests(["run"], "new", output=OutputOptions(max_shard_size=1))


def names_of_one_file(folder: Path, *, ignores_case: bool) -> None:
    """Make `folder` behave like a filesystem that ignores case (macOS, Windows), or like ext4."""
    (folder / "Out").mkdir()
    (folder / "Out" / "old").touch()
    other = folder / "oUT"
    other.symlink_to("Out") if ignores_case else other.mkdir()
    if ignores_case:
        (folder / "Out" / "OLD").symlink_to("old")


@pytest.mark.parametrize("ignores_case", [True, False])
def test_names_that_differ_in_the_case_of_letters(tree: Path, *, ignores_case: bool) -> None:
    """Outputs whose names differ only in case are refused if the filesystem ignores case. If the output folder does not
    exist, its nearest existing parent is tested.
    """
    for name in ("A.pt", "a.pt"):
        (tree / "both" / name).parent.mkdir(exist_ok=True)
        (tree / "both" / name).touch()
    names_of_one_file(tree, ignores_case=ignores_case)
    if ignores_case:
        with pytest.raises(
            RefusedError, match=r"Out/new/a\.pt: both/A\.pt and both/a\.pt would both be written to this"
        ):
            list_requests(["both"], "Out/new")
    else:
        assert len(list_requests(["both"], "Out/new").requests) == 2


def test_the_input_that_has_the_same_output_is_named(tmp_path: Path) -> None:
    """The error names the two inputs with the same output, and not one whose output differs in case."""
    names_of_one_file(tmp_path, ignores_case=False)
    targets = [(tmp_path / "Out" / name, Path(src)) for name, src in (("A.pt", "1"), ("a.pt", "2"), ("a.pt", "3"))]
    with pytest.raises(RefusedError, match="2 and 3 would both be written"):
        refuse_one_place(targets)


def test_a_path_without_letters_has_one_spelling() -> None:
    """If no folder of a path contains letters, the filesystem is not tested."""
    refuse_one_place([(Path("/1/2/A"), Path("x")), (Path("/1/2/a"), Path("y"))])


@pytest.mark.parametrize("ignores_case", [True, False])
def test_an_output_inside_the_input_by_another_spelling(tree: Path, *, ignores_case: bool) -> None:
    """An output inside the input is refused if the filesystem ignores case and the names differ only in case."""
    names_of_one_file(tree, ignores_case=ignores_case)
    (tree / "Out" / "a.pt").touch()
    if ignores_case:
        with pytest.raises(UsageError, match="inside the input"):
            list_requests(["Out"], "oUT/new")
    else:
        assert len(list_requests(["Out"], "oUT/new").requests) == 1


def test_files_that_are_left_are_listed(tree: Path) -> None:
    """Files that are not checkpoints, and folders that are not entered, are listed as left, unless they are copied."""
    listing = list_requests(["run"], "new")
    assert listing.is_batch
    assert [str(path) for path in listing.other] == ["run/config.json"]
    assert [str(path) for path in listing.unentered] == ["run/.git"]
    assert list_requests(["run"], "new", output=OutputOptions(copy_others=True)).other == ()


def test_files_next_to_a_merged_set_are_listed(tree: Path) -> None:
    """If a set or DCP folder becomes one file, the notes name all other files of its folder."""
    (tree / "dcp" / "meta.pt").touch()
    for src, left, them in (
        ("hub", "2 other files left: config.json, optimizer.pt", "them"),
        ("dcp", "1 other file left: meta.pt", "it"),
    ):
        listing, notes = list_requests([src], "b.pt"), find_request(src, "b.pt").notes
        assert not listing.is_batch
        assert notes == (f"{left}; to a folder, --copy-others copies {them}",)
    assert find_request(f"hub/{SHARDS[2]}", "b.pt").notes == find_request("hub", "b").notes == ()


def test_shards_by_themselves_get_no_index(tree: Path) -> None:
    """Shards that are given one by one get no index, and a note suggests the command for the set. A set that is given
    as its folder or index has no note.
    """
    listing = list_requests([f"hub/{name}" for name in SHARDS[:2]], "new")
    assert listing.notes == ("2 shards without an index; to convert the set: ckptconv convert hub OUT_FOLDER",)
    assert list_requests(["hub", "a.pt"], "new").notes == list_requests(["a.pt", f"hub/{SHARDS[2]}"], "new").notes == ()


def test_shards_to_one_file_are_merged_by_their_folder(tree: Path) -> None:
    """Shards that are given one by one cannot be merged into one file. The hint suggests the folder. Other inputs have
    no hint.
    """
    for srcs, hint in (
        ([f"hub/{name}" for name in SHARDS[:2]], "to merge a sharded set: ckptconv convert hub b.pt"),
        ([f"hub/{SHARDS[0]}", "a.pt"], None),
        (["a.pt", "a.pt"], None),
    ):
        with pytest.raises(UsageError, match="several inputs need a folder") as caught:
            list_requests(srcs, "b.pt")
        assert caught.value.hint == hint


def test_dcp_folders_in_place(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree that is converted onto itself, the output of a DCP folder is next to it. From within the DCP folder,
    the hint suggests an output outside it.
    """
    assert listed("all", "all")[0] == "all/dcp dcp all/dcp.pt"
    monkeypatch.chdir(tree / "dcp")
    with pytest.raises(UsageError, match="among the files") as caught:
        list_requests(["."], ".")
    assert caught.value.hint == f"ckptconv convert {tree / 'dcp'} {tree / 'dcp.pt'}"


def test_find_request_accepts_one_checkpoint(tree: Path) -> None:
    """``find_request`` accepts one checkpoint. For a folder with several it suggests the command or function that
    converts all of them.
    """
    assert find_request("a.pt", "there").dst == Path("there/a.pt")
    with pytest.raises(UsageError, match="2 checkpoints in the folder") as caught:
        find_request("run", "new")
    assert caught.value.hint == "to convert all of them: ckptconv convert run new"
    call = "ckptconv.convert_many(ckptconv.jobs_in('run', 'new'))"
    assert isinstance(caught.value.hint, Message)
    with python_words():
        assert Message(*caught.value.hint.parts) == f"to convert all of them: {call}"


def test_dots_have_names(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``.`` is replaced by the name of the working directory, also for a DCP folder."""
    monkeypatch.chdir(tree / "run")
    assert [str(item.dst) for item in list_requests([".", "../a.pt"], "../new").requests] == [
        "../new/run/deep/model.safetensors",
        "../new/run/x.pt",
        "../new/a.pt",
    ]
    monkeypatch.chdir(tree / "dcp")
    assert [str(item.dst) for item in list_requests(["."], "../new").requests] == ["../new/dcp.pt"]


def test_an_output_inside_the_input_through_a_link(tree: Path) -> None:
    """An output inside the input is refused, also if the path leads there through a link."""
    os.symlink("run", tree / "link")
    with pytest.raises(UsageError, match="inside the input"):
        list_requests(["run"], "link/out")


def test_an_output_next_to_the_parts_of_the_input(tree: Path) -> None:
    """An output file in the folder of a set or DCP checkpoint is accepted if its name is given and it replaces no part
    of the input.
    """
    for src, dst in (("dcp", "dcp/b.pt"), ("dcp", "dcp/deeper/b.pt"), ("hub", "hub/whole.safetensors")):
        assert [(item.dst, item.is_folder) for item in list_requests([src], dst).requests] == [(Path(dst), False)]


# Links


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint on a GPU, and a link to it from another folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "here").mkdir()
    zoo.save({"w": torch.ones(3)}, tmp_path / "real" / "a.pt", ("cuda:1",))
    os.symlink("../real/a.pt", tmp_path / "here" / "link.pt")
    return tmp_path / "real" / "a.pt", tmp_path / "here" / "link.pt"


def devices_in(path: Path) -> list[str]:
    return [each.device for each in ckptconv.inspect(path).tensors]


@pytest.mark.parametrize("is_batch", [False, True], ids=["one", "batch"])
def test_a_link_onto_itself_is_kept(linked: tuple[Path, Path], is_batch: bool, command: Command) -> None:
    """If a link is converted onto itself, its target is converted and the link is kept, also in a batch."""
    real, link = linked
    paths = (link.parent, link.parent) if is_batch else (link, link)
    said = command("convert", *paths, "--to", "cpu", "--force", "-v").err
    assert f"{link} is a link: {real} is converted, and the link is kept" in said
    assert link.is_symlink() and devices_in(real) == devices_in(link) == ["cpu"]
    assert os.listdir(real.parent) == ["a.pt"] and os.listdir(link.parent) == ["link.pt"]


def test_any_other_link_at_the_target_is_replaced(linked: tuple[Path, Path]) -> None:
    """If the output is a link to the input under another name, the link is replaced. A link onto itself is refused
    without ``force``.
    """
    real, link = linked
    refused(RefusedError, "the output is the same file as the input", link, link, map_location="cpu")
    report = ckptconv.convert(real, link, map_location="cpu", force=True)
    assert not link.is_symlink() and report.notes == ()
    assert (devices_in(real), devices_in(link)) == (["cuda:1"], ["cpu"])


def test_in_the_cache_of_the_hub_the_link_is_replaced(linked: tuple[Path, Path], tmp_path: Path) -> None:
    """In a cache of the Hub, the link is replaced and the blob is not changed, because its name is its checksum. A note
    states this.
    """
    real = linked[0]
    blob, snapshot = tmp_path / "blobs" / "0123456789abcdef", tmp_path / "snapshots" / "main" / "m.pt"
    blob.parent.mkdir()
    snapshot.parent.mkdir(parents=True)
    real.rename(blob)
    os.symlink("../../blobs/0123456789abcdef", snapshot)
    report = ckptconv.convert(snapshot, snapshot, map_location="cpu", force=True)
    assert "0123456789ab is unchanged" in report.notes[0]
    assert not snapshot.is_symlink() and (devices_in(blob), devices_in(snapshot)) == (["cuda:1"], ["cpu"])
