"""Which file is written, and in which format."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptconv.errors import UsageError
from ckptconv.targets import find_target, usual_format


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
    ],
)
def test_the_format_is_what_is_asked_for_or_what_the_suffix_says(
    tmp_path: Path, name: str, format: str | None, expected: str
) -> None:
    """`.safetensors` is safetensors, every other suffix pt unless --format says otherwise; all are free where the suffix is unknown."""
    path, meant = find_target(Path("in.pt"), tmp_path / name, format)
    assert (path, meant or usual_format(name, "torch zip")) == (tmp_path / name, expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.pkl", "pickle"), ("a.PICKLE", "pickle"), ("a.pt", "pt"), ("a", "pt"), ("a.safetensors", "safetensors")],
)
def test_a_plain_pickle_stays_one_where_the_suffix_says_so(tmp_path: Path, name: str, expected: str) -> None:
    """Who wrote `.pkl` for a pickle means a pickle; no other source becomes one unasked."""
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
    """A suffix that says otherwise would make a file that lies; a format that nobody knows is no format."""
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
    ],
)
def test_in_a_folder_the_name_follows_the_format(tmp_path: Path, src: str, format: str | None, name: str) -> None:
    """It keeps its stem; what the Hub calls by two names in two formats gets the other one. A slash at the end is a folder too."""
    for folder in (str(tmp_path), f"{tmp_path}/new/"):
        path, found = find_target(Path(src), folder, format)
        assert path == Path(folder) / name
        assert found == (format or ("safetensors" if name.endswith("safetensors") else None))


def test_an_empty_path_is_no_output() -> None:
    """It would mean the folder that one is in."""
    with pytest.raises(UsageError, match="empty"):
        find_target(Path("a.pt"), "", None)
