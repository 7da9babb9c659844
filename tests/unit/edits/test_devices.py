"""Tests of the rules of ``--to``, ``--map`` and ``map_location``: the new location tag of each old one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptconv
from ckptconv.edits.devices import FAMILIES, parse_target, to_devices
from ckptconv.errors import UsageError

TAGS = ("cpu", "cuda:0", "cuda:1", "cuda:7", "mps", "xpu:1", "hpu", "meta", "odd:3", "odd")


def became(*wishes: Any, rng: bool = False) -> dict[str, str]:
    """Return the location tags in TAGS that the rules change, with their new tags."""
    devices = to_devices(*wishes)
    return {tag: new for tag in TAGS if (new := devices.new_tag(tag, rng=rng)) != tag}


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        ("cpu:3", "cpu"),
        ("mps", "mps"),
        ("mps:0", "mps"),
        ("gpu", "cuda:0"),
        ("cuda", "cuda:0"),
        ("gpu:2", "cuda:2"),
        ("cuda:0", "cuda:0"),
        ("cuda:127", "cuda:127"),
        ("xpu", "xpu:0"),
        ("hpu:1", "hpu:1"),
        ("mtia", "mtia:0"),
        ("npu:3", "npu:3"),
        ("mlu", "mlu:0"),
        ("musa", "musa:0"),
        ("privateuseone:5", "privateuseone:5"),
    ],
)
def test_a_bare_device_is_the_target_of_all(text: str, tag: str) -> None:
    """A device that is given without OLD is the target of every tag, whatever its index. ``cuda`` is the first GPU."""
    devices = to_devices(text)
    assert {devices.new_tag(old) for old in TAGS} == {tag}


@pytest.mark.parametrize(
    "text",
    [
        "xla",
        "xla:0",
        "vulkan",
        "meta",
        "disk",
        "any",
        "*",
        "",
        " cpu",
        "cuda ",
        "CUDA:0",
        "cuda:",
        "cuda:-1",
        "cuda:+1",
        "cuda:01",
        "cuda:00",
        "cuda:1.0",
        "cuda:128",
        "cuda:300",
        "cuda:٣",
        "cpu:128",
        "cpu:00",
        "mps:1",
        "cuda:0:1",
        "cuda0",
        "cuda:0\n",
        "gpus",
        "xcuda",
        "None",
        "0",
    ],
)
def test_refused_targets(text: str) -> None:
    """A device that tensors cannot be moved to, or that torch would parse as another one, is a usage error. This
    applies to the target and to NEW in a rule.
    """
    with pytest.raises(UsageError):
        parse_target(text)
    with pytest.raises(UsageError):
        to_devices({"cuda:0": text})


@pytest.mark.parametrize(("text", "why"), [("xla:0", "no tag"), ("vulkan", "no tag"), ("meta", "no data")])
def test_refusals_have_reasons(text: str, why: str) -> None:
    """A device that torch knows but cannot restore is refused with a reason and a suggestion."""
    with pytest.raises(UsageError, match=f"{why}.*--to cpu"):
        parse_target(text)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("cuda:0=cuda:1", {"cuda:0": "cuda:1"}),
        ("cuda=cpu", {"cuda:0": "cpu", "cuda:1": "cpu", "cuda:7": "cpu"}),
        ("gpu:1=cpu", {"cuda:1": "cpu"}),
        ("gpu=cpu", {tag: "cpu" for tag in TAGS if tag not in ("cpu", "meta")}),
        ("any=cpu", {tag: "cpu" for tag in TAGS if tag != "cpu"}),
        ("*=cpu", {tag: "cpu" for tag in TAGS if tag != "cpu"}),
        ("cuda=xpu", {"cuda:0": "xpu:0", "cuda:1": "xpu:1", "cuda:7": "xpu:7"}),
        ("cuda=mps", {"cuda:0": "mps", "cuda:1": "mps", "cuda:7": "mps"}),
        ("xpu:1=cuda", {"xpu:1": "cuda:1"}),
        ("cpu=gpu", {"cpu": "cuda:0"}),
        ("cpu:0=cuda:3", {"cpu": "cuda:3"}),
        ("mps:0=gpu", {"mps": "cuda:0"}),
        ("hpu=gpu", {"hpu": "cuda:0"}),
        ("odd=gpu", {"odd:3": "cuda:3", "odd": "cuda:0"}),
        ("odd:3=cpu", {"odd:3": "cpu"}),
        ("meta=cpu", {"meta": "cpu"}),
        ("cuda:2=cpu", {}),
    ],
)
def test_one_rule(wish: str, expected: dict[str, str]) -> None:
    """OLD is a tag, a family, ``gpu`` (every device except cpu and meta) or ``any``. NEW without an index keeps the old
    index, or uses 0.
    """
    assert became(wish) == expected
    old, new = wish.split("=")
    assert became({old: new}) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [("cuda:300", "xpu:0"), ("my_backend:2", "xpu:2"), ("gpu9:4", "xpu:4"), ("cuda:01", "xpu:0"), ("a:b", "xpu:0")],
)
def test_kept_indexes(old: str, new: str) -> None:
    """The index of any backend's tag is kept if torch supports it."""
    assert to_devices("any=xpu").new_tag(old) == new


def test_most_specific_wins_in_any_order() -> None:
    """The most specific rule applies: a tag before a family, a family before ``gpu``, and ``gpu`` before ``any``. The
    target applies to tags without a rule.
    """
    rules = ("cuda:1=xpu:7", "cuda=npu", "gpu=mps", "any=hpu:2")
    expected = {
        "cpu": "hpu:2",
        "cuda:0": "npu:0",
        "cuda:1": "xpu:7",
        "cuda:7": "npu:7",
        "xpu:1": "mps",
        "hpu": "mps",
        "meta": "hpu:2",
        "odd:3": "mps",
        "odd": "mps",
    }
    assert became(*rules) == became(*rules[::-1]) == expected
    assert became("mtia:1", *rules[:2]) == {
        "cpu": "mtia:1",
        "cuda:0": "npu:0",
        "cuda:1": "xpu:7",
        "cuda:7": "npu:7",
        "mps": "mtia:1",
        "xpu:1": "mtia:1",
        "hpu": "mtia:1",
        "meta": "mtia:1",
        "odd:3": "mtia:1",
        "odd": "mtia:1",
    }


def test_rules_apply_at_the_same_time() -> None:
    """All rules apply to the old tags at the same time, so two devices can be swapped."""
    assert became("cuda:0=cuda:1", "cuda:1=cuda:0") == {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}
    assert became("cuda=cpu", "cpu=cuda:7") == {"cpu": "cuda:7", "cuda:0": "cpu", "cuda:1": "cpu", "cuda:7": "cpu"}


@pytest.mark.parametrize(
    "wishes",
    [
        ("cuda:0=cpu", "cuda:0=cuda:1"),
        ("cuda:0=cpu", "cuda:0=cpu"),
        ("any=cpu", "*=cuda:1"),
        ("cpu=gpu", "cpu:0=cuda:1"),
        ("mps=cpu", "mps:0=gpu"),
        ("gpu:1=cpu", "cuda:1=cpu"),
        ({torch.device("cuda:0"): "cpu", "cuda:0": "cpu"},),
        ({"any": "cpu", "*": "cpu"},),
        ("cuda:0=cpu", {"cuda:0": "cpu"}),
        ("cpu", "cpu"),
        ("cpu", "cuda:1"),
        ("=cpu",),
        ("cuda:0=",),
        ("cuda:0=cuda:1=cpu",),
        ({"": "cpu"},),
        ({"cuda:0": None},),
        (str.lower, "cpu"),
        (str.lower, {"cuda:0": "cpu"}),
    ],
)
def test_contradictions(wishes: tuple[Any, ...]) -> None:
    """Two rules for the same OLD in any spelling, two targets, an incomplete rule, or a function with another rule are
    usage errors.
    """
    with pytest.raises(UsageError):
        to_devices(*wishes)


def test_a_tag_and_its_family_do_not_contradict() -> None:
    """A tag and its family, or ``gpu`` and a family, can have different rules."""
    assert became("cuda:0=cpu", "cuda=cuda:7", "gpu=xpu:1")["hpu"] == "xpu:1"


def test_torch_device_objects() -> None:
    """A ``torch.device`` can be used instead of its text."""
    assert became(torch.device("cuda", 1)) == became("cuda:1")
    assert became(torch.device("cuda")) == became("cuda")
    mapping = {torch.device("cuda:0"): torch.device("cpu"), torch.device("cpu"): torch.device("mps")}
    assert became(mapping) == {"cuda:0": "cpu", "cpu": "mps"}
    with pytest.raises(UsageError):
        to_devices(torch.device("meta"))


def test_an_empty_mapping() -> None:
    """None and empty mappings give rules that are false and keep every tag."""
    for wishes in ((), (None,), ({},), (None, {})):
        assert not to_devices(*wishes)
        assert became(*wishes) == {}
    assert to_devices("cpu") and to_devices("cuda=cpu") and to_devices(str.lower)


# Functions


def last_gpu(tag: str, default: str = "cuda:7") -> str:
    return default if tag.startswith("cuda") else tag


class Sender:
    def __call__(self, tag: str) -> str:
        return "cpu"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (last_gpu, {"cuda:0": "cuda:7", "cuda:1": "cuda:7"}),
        (functools.partial(last_gpu, default="mps"), {"cuda:0": "mps", "cuda:1": "mps", "cuda:7": "mps"}),
        (Sender(), {tag: "cpu" for tag in TAGS if tag != "cpu"}),
        (lambda *tags: "cpu", {tag: "cpu" for tag in TAGS if tag != "cpu"}),
        (lambda tag: torch.device("cpu") if tag == "mps" else tag, {"mps": "cpu"}),
        (
            lambda tag: "xpu" if tag.startswith("cuda") else tag,
            {"cuda:0": "xpu:0", "cuda:1": "xpu:1", "cuda:7": "xpu:7"},
        ),
        (str, {}),
        (str.lower, {}),
    ],
)
def test_functions_from_tag_to_tag(function: Callable[[str], str], expected: dict[str, str]) -> None:
    """A function is called with each tag, also an unknown one, and may return the tag itself. Partial functions and
    builtins are accepted.
    """
    assert became(function) == expected
    assert became(dict(expected)) == expected


def test_a_function_cannot_invent_a_device() -> None:
    """The result of a function must be a valid target or the tag itself."""
    with pytest.raises(UsageError):
        became(lambda tag: "disk")
    with pytest.raises(UsageError):
        became({"cuda:0": "cpu"}.get)


@pytest.mark.parametrize("function", [lambda storage, tag: storage, lambda: "cpu", lambda tag, *, needed: tag])
def test_torchs_two_argument_callable_is_a_type_error(function: Any) -> None:
    """A function with torch's two arguments is refused before a file is opened, because there is no storage to pass.
    The error suggests a function of one argument.
    """
    with pytest.raises(TypeError, match=r"one argument.*lambda tag: 'cpu'"):
        to_devices(function)
    with pytest.raises(TypeError, match="lambda tag"):
        ckptconv.convert("absent.pt", "out.pt", map_location=function)


# States of random generators


@pytest.mark.parametrize("to", ["cpu", "gpu", "cuda:1", "mps", "xpu:3"])
def test_a_target_sends_generator_states_to_the_cpu(to: str) -> None:
    """A target moves generator states to the CPU, because torch accepts them only there."""
    devices = to_devices(to)
    assert {devices.new_tag(tag, rng=True) for tag in TAGS} == {"cpu"}


@pytest.mark.parametrize(
    ("wishes", "tag", "new"),
    [
        # a rule does not move a state off the CPU, except a rule for ``any``, also with a target
        *((wish, "cpu", "cpu") for wish in (["cpu=gpu"], ["cpu:0=mps"], ["gpu=xpu:1"], ["cuda:0=cuda:1"])),
        ([lambda tag: "cuda:0"], "cpu", "cpu"),
        (["any=cuda:1"], "cpu", "cuda:1"),
        ([{"*": "cuda:1"}], "cpu", "cuda:1"),
        (["any=cuda:1", "cpu"], "cpu", "cuda:1"),
        # a state on a GPU follows the rules, and a target moves it to the CPU if no rule matches
        (["cuda=cpu"], "cuda:1", "cpu"),
        (["cuda:1=xpu:1", "mps"], "cuda:1", "xpu:1"),
        (["cuda:1=xpu:1", "mps"], "cuda:0", "cpu"),
        (["cuda:1=xpu:1"], "cuda:0", "cuda:0"),
    ],
)
def test_maps_of_generator_states(wishes: list[Any], tag: str, new: str) -> None:
    """Rules keep generator states on the CPU, and apply to states on other devices."""
    assert to_devices(*wishes).new_tag(tag, rng=True) == new


# Laws

devices = st.builds(
    lambda family, index: family if index is None else f"{family}:{index}",
    st.sampled_from(FAMILIES),
    st.none() | st.integers(0, 127),
)


@given(st.dictionaries(devices, devices, max_size=5), devices)
def test_new_tags_are_valid(mapping: Mapping[str, str], old: str) -> None:
    """A new tag is ``cpu``, ``mps`` or ``family:index``, and as a target it gives itself."""
    try:
        rules = to_devices(mapping)
    except UsageError:
        return  # invalid rules, such as mps:1, or both cpu and cpu:0
    new = rules.new_tag(old)
    if new != old:
        assert new in ("cpu", "mps") or new.rpartition(":")[2].isdecimal()
        assert to_devices(new).new_tag(old) == new
