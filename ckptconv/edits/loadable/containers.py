"""Namespaces, mappings, OmegaConf's containers, queues and frozen sets: dicts, lists and sets."""

from __future__ import annotations

from ckptconv.edits.loadable.pickled import NotPlain, Pickled
from ckptconv.pickles.graph import AT_ONCE, Dict, Effect, List, Node, Set, Value, members_of, set_items

#: Attributes that mappings keep for themselves, beside their items.
_OWN = ("__immutable__", "__deprecated_keys__", "__renamed_keys__", "__new_allowed__", "__frozen", "__parent", "__key")
_WITH_FACTORY = "collections.defaultdict"  # which is called with what makes missing values first
_WORDS = {"__class__", "__args__", "__state__", "__items__", "__elements__"}


def _list(elements: list[Value]) -> List:
    """A list of `elements`."""
    made = List()
    for start in range(0, len(elements), AT_ONCE):
        made.add(Effect("APPENDS", elements[start : start + AT_ONCE], None))
    return made


def namespace(made: Pickled) -> Dict:
    """A dict of the attributes."""
    if made.args or made.items or made.elements:
        raise NotPlain("it has more than attributes")
    return set_items(Dict(), [value for item in made.attributes().items() for value in item])


def mapping(made: Pickled) -> Dict:
    """A dict of the items of a mapping, whose attributes say nothing else."""
    items = made.items
    args = made.args[1:] if made.cls == _WITH_FACTORY else made.args
    if args and not made.is_new:  # called with them; dict.__new__ does not look at them
        if len(args) > 1 or not isinstance(args[0], Dict):
            raise NotPlain("it is made of what is no dict")
        items = [value for effect, i in args[0].pairs() for value in effect.values[i : i + 2]] + items
    if made.elements:
        raise NotPlain("it is a mapping and a list")
    if [state for state in made.states if state is not made.call]:  # a class can have itself as its attributes
        known = {key: value for key, value in zip(items[::2], items[1::2], strict=True) if isinstance(key, str)}
        for name, value in made.attributes().items():
            if name not in _OWN and not (name in known and _is_same(known[name], value)):
                raise NotPlain(f"its attribute {name} is no item of it")
    return set_items(Dict(), items)


def _is_same(a: Value, b: Value) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Node) and a == b)


def config(attribute: str, made: Pickled) -> Value:
    """What a container or a node of OmegaConf's holds as this `attribute`; a text where it is missing or an
    interpolation.
    """
    attributes = made.attributes()
    if made.args or made.items or made.elements or attribute not in attributes:
        raise NotPlain("it is none of OmegaConf 2")
    return attributes[attribute]


def queue(made: Pickled) -> List:
    """A list of what is in a deque."""
    first = made.args[0] if made.args else None
    held = members_of(first) if first is not None else []
    if held is None or len(made.args) > 2 or made.items or made.attributes():
        raise NotPlain("it is not said as Python says a deque")
    return _list([*held, *made.elements])


def random_state(made: Pickled) -> Dict:
    """The state of a RandomState, in which its generator's stands too."""
    state = made.states[0] if len(made.states) == 1 else None
    if not isinstance(state, Dict) or made.items or made.elements:
        raise NotPlain("its state is not said as numpy says one")
    return state


def frozen_set(members: list[Value]) -> Set:
    """A set of `members`."""
    made = Set()
    for start in range(0, len(members), AT_ONCE):
        made.add(Effect("ADDITEMS", members[start : start + AT_ONCE], None))
    return made


def named(name: str) -> Dict:
    """A dict that says the `name` of a class or function."""
    return set_items(Dict(), ["__global__", name])


def described(made: Pickled) -> Dict:
    """A dict that says what the pickle says: the class, and the attributes of the object.

    What it is called with, holds as a mapping or list, or has as another state, has keys like ``__args__``.
    """
    items: list[Value] = ["__class__", made.cls]
    if made.args:
        items += ("__args__", _list(made.args))
    try:
        attributes: dict[str, Value] = made.attributes()
    except NotPlain:
        attributes = {}
        items += ("__state__", made.states[0] if len(made.states) == 1 else _list(made.states))
    if made.items:
        items += ("__items__", set_items(Dict(), made.items))
    if made.elements:
        items += ("__elements__", _list(made.elements))
    if not _WORDS.isdisjoint(attributes):
        raise NotPlain("an attribute is called as what says its class")
    return set_items(Dict(), [*items, *(value for item in attributes.items() for value in item)])
