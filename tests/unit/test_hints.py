"""Errors speak of flags on the command line and of keywords in Python, and mean the same."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptconv
from ckptconv.hints import in_python
from tests.support.command import Command


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("--force replaces it", "force=True replaces it"),
        ("for the first: --select ema/model", "for the first: select='ema/model'"),
        ("--select 'a b[0]' takes", "select='a b[0]' takes"),
        ("leave them out: --exclude a --exclude 'b c'", "leave them out: exclude=['a', 'b c']"),
        ("""--exclude 'it'"'"'s [(]3)' --exclude '-n'""", """exclude=["it's [(]3)", '-n']"""),
        ("--exclude GLOB, such as --exclude a", "exclude=GLOB, such as exclude='a'"),
        ("for less: --rename '^mod' ''", "for less: rename=[('^mod', '')]"),
        ("--rename REGEX REPLACEMENT", "rename=[(REGEX, REPLACEMENT)]"),
        ("try: --to cpu", "try: map_location='cpu'"),
        ("--format safetensors; else --state-dict", "format='safetensors'; else state_dict=True"),
        ("--max-shard-size 5GB, --copy-others", "max_shard_size='5GB', copy_others=True"),
        ("--max-shard-size writes a folder", "max_shard_size writes a folder"),
        ("no flag here, - and -- are none", "no flag here, - and -- are none"),
    ],
)
def test_flags_become_keywords(flags: str, keywords: str) -> None:
    """Values as Python quotes them, a flag that is given twice as a list."""
    assert in_python(flags) == keywords


def test_the_same_error_in_both_tongues(tmp_path: Path, command: Command) -> None:
    """What the command line advises as a flag, the function advises as a keyword, and each works where it is said."""
    src, dst = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"x": {"w": torch.ones(1)}, "y": {"w": torch.ones(1)}}, src)
    for flags, keywords in ((["--state-dict"], {"state_dict": True}), (["--strip-prefix", "w"], {"strip_prefix": "w"})):
        said = command("convert", src, dst, *flags, status=1).err
        with pytest.raises(ckptconv.CkptconvError) as caught:
            ckptconv.convert(src, dst, **keywords)  # type: ignore[arg-type]
        assert "--" not in str(caught.value)
        if "--select" in said:
            command("convert", src, dst, *shlex.split(said[said.index("--select") :]))
            select: dict[str, Any] = eval(f"dict({str(caught.value.hint).split(': ')[1]})")
            ckptconv.convert(src, dst, force=True, **select)
    with pytest.raises(ckptconv.TargetExistsError, match="force=True"):
        ckptconv.convert(src, dst)
    with pytest.raises(ckptconv.UsageError, match="map_location='cpu'"):
        ckptconv.remap([], "meta")
    with pytest.raises(ckptconv.UsageError, match="'auto' is for load and remap"):
        ckptconv.convert(src, dst, map_location="auto")
