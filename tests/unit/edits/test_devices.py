"""The grammar of ``--to``, ``--map`` and ``map_location``: which tag becomes which."""

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
    """Those of TAGS that become others, and what."""
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
    """``--to`` sends every tag to one device, whatever its index was; ``cuda`` is the first GPU."""
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
    """What no tensor can be sent to, or what torch's own parser would take for another device,
    is a usage error, as target and as NEW.
    """
    with pytest.raises(UsageError):
        parse_target(text)
    with pytest.raises(UsageError):
        to_devices({"cuda:0": text})


@pytest.mark.parametrize(("text", "why"), [("xla:0", "no tag"), ("vulkan", "no tag"), ("meta", "no data")])
def test_refusals_say_why(text: str, why: str) -> None:
    """A device that torch knows but cannot restore is refused with the reason and another one to try."""
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
    """OLD is a tag, a family, gpu (all but cpu and meta, known or not) or any; NEW without an
    index keeps the old one, else takes 0.
    """
    assert became(wish) == expected
    old, new = wish.split("=")
    assert became({old: new}) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [("cuda:300", "xpu:0"), ("my_backend:2", "xpu:2"), ("gpu9:4", "xpu:4"), ("cuda:01", "xpu:0"), ("a:b", "xpu:0")],
)
def test_which_index_is_kept(old: str, new: str) -> None:
    """The index of any backend's tag, as long as torch could hold it."""
    assert to_devices("any=xpu").new_tag(old) == new


def test_most_specific_wins_in_any_order() -> None:
    """A tag before a family, a family before gpu, gpu before any, and ``--to`` for what nothing matched."""
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


def test_all_at_once_so_swaps_work() -> None:
    """No rule sees what another one made."""
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
    """The same OLD twice however it is spelt, two targets, half a rule, a function beside anything
    else: usage errors.
    """
    with pytest.raises(UsageError):
        to_devices(*wishes)


def test_a_tag_and_its_family_are_no_contradiction() -> None:
    """Nor are gpu and cuda: one is all that is no cpu, the other a family."""
    assert became("cuda:0=cpu", "cuda=cuda:7", "gpu=xpu:1")["hpu"] == "xpu:1"


def test_torch_device_objects() -> None:
    """``torch.device`` serves wherever its string does."""
    assert became(torch.device("cuda", 1)) == became("cuda:1")
    assert became(torch.device("cuda")) == became("cuda")
    mapping = {torch.device("cuda:0"): torch.device("cpu"), torch.device("cpu"): torch.device("mps")}
    assert became(mapping) == {"cuda:0": "cpu", "cpu": "mps"}
    with pytest.raises(UsageError):
        to_devices(torch.device("meta"))


def test_nothing_said_changes_nothing() -> None:
    """None and an empty mapping are falsy and keep every tag."""
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
    """Called with each tag, unknown ones too, which it may hand back; builtins and partials serve.

    It says what a mapping would.
    """
    assert became(function) == expected
    assert became(dict(expected)) == expected


def test_a_function_cannot_invent_a_device() -> None:
    """What it returns is checked like any other target, unless it is the tag itself."""
    with pytest.raises(UsageError):
        became(lambda tag: "disk")
    with pytest.raises(UsageError):
        became({"cuda:0": "cpu"}.get)


@pytest.mark.parametrize("function", [lambda storage, tag: storage, lambda: "cpu", lambda tag, *, needed: tag])
def test_torchs_two_argument_callable_is_a_type_error(function: Any) -> None:
    """There is no storage to pass; the error says what to pass instead, before any file is opened."""
    with pytest.raises(TypeError, match=r"one argument.*lambda tag: 'cpu'"):
        to_devices(function)
    with pytest.raises(TypeError, match="lambda tag"):
        ckptconv.convert("absent.pt", "out.pt", map_location=function)


# States of random generators


@pytest.mark.parametrize("to", ["cpu", "gpu", "cuda:1", "mps", "xpu:3"])
def test_a_target_sends_generator_states_to_the_cpu(to: str) -> None:
    """``--to`` anything: torch takes them from the CPU alone."""
    devices = to_devices(to)
    assert {devices.new_tag(tag, rng=True) for tag in TAGS} == {"cpu"}


@pytest.mark.parametrize(
    ("wishes", "tag", "new"),
    [
        # a map never moves one off the CPU, but for ``any``, whose name says it, whatever ``--to`` says
        *((wish, "cpu", "cpu") for wish in (["cpu=gpu"], ["cpu:0=mps"], ["gpu=xpu:1"], ["cuda:0=cuda:1"])),
        ([lambda tag: "cuda:0"], "cpu", "cpu"),
        (["any=cuda:1"], "cpu", "cuda:1"),
        ([{"*": "cuda:1"}], "cpu", "cuda:1"),
        (["any=cuda:1", "cpu"], "cpu", "cuda:1"),
        # one that stands on a GPU follows the rules like everything else, and ``--to`` fetches it where no rule does
        (["cuda=cpu"], "cuda:1", "cpu"),
        (["cuda:1=xpu:1", "mps"], "cuda:1", "xpu:1"),
        (["cuda:1=xpu:1", "mps"], "cuda:0", "cpu"),
        (["cuda:1=xpu:1"], "cuda:0", "cuda:0"),
    ],
)
def test_maps_of_generator_states(wishes: list[Any], tag: str, new: str) -> None:
    """They stay on the CPU, and a strayed one comes back."""
    assert to_devices(*wishes).new_tag(tag, rng=True) == new


# Laws

devices = st.builds(
    lambda family, index: family if index is None else f"{family}:{index}",
    st.sampled_from(FAMILIES),
    st.none() | st.integers(0, 127),
)


@given(st.dictionaries(devices, devices, max_size=5), devices)
def test_what_comes_out_is_a_tag_that_torch_writes(mapping: Mapping[str, str], old: str) -> None:
    """A new tag is ``cpu``, ``mps`` or ``family:index``; its own target is itself."""
    try:
        rules = to_devices(mapping)
    except UsageError:
        return  # mps:1, or cpu and cpu:0
    new = rules.new_tag(old)
    if new != old:
        assert new in ("cpu", "mps") or new.rpartition(":")[2].isdecimal()
        assert to_devices(new).new_tag(old) == new
