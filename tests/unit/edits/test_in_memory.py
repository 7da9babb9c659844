"""Prefixes of state dicts in memory. The results equal those of ``convert``, and the modules of torch load them."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import ckptconv
from ckptconv.errors import CollisionError, NoMatchError, UsageError
from tests.support.judge import assert_same


def model() -> nn.Module:
    """Return a model that contains a buffer, and whose state dict has an entry in ``_metadata`` for each module."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1)))


def test_strip_prefix_gives_the_state_dict_of_the_plain_module() -> None:
    """Without ``module.``, the state dict of DataParallel equals the state dict of the plain module, including
    ``_metadata``. The argument does not change.
    """
    net = model()
    wrapped = nn.DataParallel(net).state_dict()
    before = (list(wrapped), dict(wrapped._metadata))
    found = ckptconv.strip_prefix(wrapped, "module.")
    assert_same(net.state_dict(), found)
    assert list(found._metadata.items()) == list(net.state_dict()._metadata.items())
    assert (list(wrapped), dict(wrapped._metadata)) == before
    assert all(found[name] is wrapped["module." + name] for name in found)
    net.load_state_dict(found, strict=True)


def test_add_prefix_gives_the_state_dict_of_the_wrapper() -> None:
    """A state dict with a prefix equals the state dict of a wrapper, also for a prefix of several segments."""
    net = model()
    assert_same(nn.DataParallel(net).state_dict(), ckptconv.add_prefix(net.state_dict(), "module"))
    holder = nn.ModuleDict({"a": nn.ModuleDict({"b": net})})
    found = ckptconv.add_prefix(net.state_dict(), "a.b.")
    assert_same(holder.state_dict(), found)
    assert found._metadata == holder.state_dict()._metadata


segment = st.sampled_from(["module", "mod", "a", "b.c", "0"])
names = st.lists(st.lists(segment, min_size=1, max_size=4).map(".".join), min_size=1, unique=True)


@given(names, st.sampled_from(["module.", "a.b.", "x."]))
def test_strip_undoes_add(found: list[str], prefix: str) -> None:
    """Adding a prefix and removing it again restores the state dict, whatever its names are."""
    state = {name: i for i, name in enumerate(found)}
    assert_same(state, ckptconv.strip_prefix(ckptconv.add_prefix(state, prefix), prefix))


@pytest.mark.parametrize(
    "wrap", [lambda net: nn.DataParallel(net), lambda net: nn.Sequential(OrderedDict(module=net, head=nn.Linear(1, 1)))]
)
@pytest.mark.parametrize(
    "edits",
    [
        {"strip_prefix": "module."},
        {"add_prefix": "module."},
        {"strip_prefix": ["module", "0"]},
        {"strip_prefix": "module.0"},
        {"add_prefix": ["a.b", "c"]},
    ],
)
def test_memory_and_file_agree(wrap: Callable[[nn.Module], nn.Module], edits: dict[str, Any], tmp_path: Path) -> None:
    """Editing a state dict in memory gives the same result, including ``_metadata``, as converting its file. This is
    also true if only some names have the prefix.
    """
    state = wrap(model()).state_dict()
    torch.save(state, tmp_path / "a.pt")
    ckptconv.convert(tmp_path / "a.pt", tmp_path / "b.pt", **edits)
    ((function, prefix),) = edits.items()
    found = getattr(ckptconv, function)(state, prefix)
    wanted = torch.load(tmp_path / "b.pt")
    assert_same(wanted, found)
    assert list(wanted._metadata.items()) == list(found._metadata.items())


def test_only_prefixes_are_removed() -> None:
    """Names without the prefix keep their positions. The helper of torch also removes the prefix ``mod`` or a later
    ``module.``, and changes the order.
    """
    state = {"mod.w": 1, "module.a": 2, "x": 3}
    assert list(ckptconv.strip_prefix(state, "module.").items()) == [("mod.w", 1), ("a", 2), ("x", 3)]
    consume_prefix_in_state_dict_if_present(state, "module.")
    assert list(state) != ["mod.w", "a", "x"]


def test_types_and_other_keys_stay() -> None:
    """The type of the mapping does not change. Keys that are not strings remain. Several prefixes are applied one after
    the other.
    """
    assert ckptconv.strip_prefix({"a.b.w": 1, 3: 2}, ["a", "b."]) == {"w": 1, 3: 2}  # type: ignore[type-var]
    assert isinstance(ckptconv.add_prefix(UserDict(w=1), "a"), UserDict)
    assert type(ckptconv.add_prefix(OrderedDict(w=1), ("a", "b"))) is OrderedDict
    assert ckptconv.add_prefix({"w": 1}, ["a", "b"]) == {"b.a.w": 1}


@pytest.mark.parametrize(
    ("function", "state", "prefix", "kind", "words"),
    [
        (ckptconv.strip_prefix, {"net.w": 1}, "module.", NoMatchError, "prefixes net"),
        (
            ckptconv.strip_prefix,
            {"epoch": 1, "state_dict": {"module.w": 1}},
            "module.",
            NoMatchError,
            r"\['state_dict'\]",
        ),
        (ckptconv.strip_prefix, {"w": 1, "module.w": 2}, "module.", CollisionError, r"'w' and 'module\.w'"),
        *((ckptconv.add_prefix, {"w": 1}, wrong, UsageError, None) for wrong in ("", ".", "a..b")),
        (ckptconv.strip_prefix, {"w": 1}, 3, TypeError, None),
    ],
)
def test_errors(
    function: Callable[..., Any], state: Any, prefix: Any, kind: type[Exception], words: str | None
) -> None:
    """A prefix that no name has, two names that would become one, and an invalid prefix raise an error. If a nested
    dict contains the prefix, the error contains its path.
    """
    with pytest.raises(kind, match=words):
        function(state, prefix)
