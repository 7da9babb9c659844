"""What BUILD, SETITEM(S) and APPEND(S) do to an object, and to which the unpickler does them."""

from __future__ import annotations

from ckptconv.checkpoint.weights_only.answers import AfterUnknown, NotKnown, Refused
from ckptconv.checkpoint.weights_only.arguments import Arguments
from ckptconv.checkpoint.weights_only.objects import Objects
from ckptconv.checkpoint.weights_only.tensors import check_gradient, set_view
from ckptconv.checkpoint.weights_only.values import COUNTER, ORDERED_DICT, UNKNOWN, Held, Made, TensorValue, said
from ckptconv.pickles.graph import Dict, Effect, List, Object, Set, Tuple, Value

#: The classes on the unpickler's list whose objects have no attributes.
_BARE = ("builtins.set", "builtins.bytearray", "builtins.complex", "torch.Size", "torch.device")


def check_effect(target: Object, effect: Effect, objects: Objects) -> None:
    """Do `effect` to `target`."""
    if isinstance(target, Dict):
        _check_keys(effect, objects)
        return
    if isinstance(target, List):
        return
    if isinstance(target, Set):
        for member in effect.values:
            objects.check_hashable(member, "member of a set")
        return
    held = objects.held(target)
    if held is UNKNOWN:
        raise AfterUnknown
    if effect.opcode == "BUILD":
        _build(target, held, effect, objects)
    elif effect.opcode in ("SETITEM", "SETITEMS") and (held is ORDERED_DICT or held is COUNTER):
        _check_keys(effect, objects)
    else:
        raise Refused(f"{effect.opcode} on {said(held)}")


def _check_keys(effect: Effect, objects: Objects) -> None:
    for key in effect.values[::2]:
        if type(key) is not str:
            objects.check_hashable(key)


def _build(target: Object, held: Held, effect: Effect, objects: Objects) -> None:
    state = effect.values[0]
    if isinstance(held, TensorValue):
        objects.made[id(target)] = _with_state(held, state, objects, effect.order)
    elif held is ORDERED_DICT:
        _check_attributes(state, objects, effect.order)
    elif held is COUNTER:
        if not objects.is_empty(state, effect.order):
            if isinstance(state, Tuple) and len(state.items) == 2:
                raise NotKnown("the state of a Counter that has slots")
            _check_attributes(state, objects, effect.order)
    elif isinstance(held, Made) and held.cls in _BARE:
        if not objects.is_empty(state, effect.order):
            raise Refused(f"BUILD on {said(held)}, which has no attributes")
    else:
        raise Refused(f"BUILD on {said(held)}")


def _check_attributes(state: Value, objects: Objects, now: int | None) -> None:
    """Attributes of an OrderedDict: what a dict can be updated with."""
    if objects.is_mapping(state):
        return
    held = objects.held(state)
    if held is None or isinstance(held, (bool, int, float)):
        raise Refused(f"the attributes of an OrderedDict are {said(held)}")
    if not objects.is_empty(state, now):
        raise NotKnown(f"the attributes of an OrderedDict are {said(held)}")


def _with_state(tensor: TensorValue, state: Value, objects: Objects, now: int | None) -> TensorValue:
    """`tensor` with the state that torch before 0.4 gave it."""
    if not isinstance(state, Tuple):
        raise NotKnown("the state of a tensor, which is no tuple")
    args = Arguments(state.items, objects, now)
    if not tensor.is_parameter:
        return set_view(tensor, args)
    if not tensor.is_plain or len(state.items) in (4, 5):
        raise NotKnown("the state of a Parameter in the way of torch before 0.4")
    if len(state.items) != 3:
        raise Refused(f"the state of a Parameter has {len(state.items)} parts")
    requires_grad = args.flag(0, "requires_grad")
    check_gradient(requires_grad, tensor.dtype)
    tensor.requires_grad = requires_grad
    return tensor
