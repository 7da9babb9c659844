"""Model torch's ``weights_only`` unpickler on a graph, without creating objects.

Calls and effects are processed in the order of the source, because the contents of a list at the time of a call depend
on it. A step that torch refuses, or that is not modelled, gives a :class:`Reason`. A graph without reasons loads.

Source: ``torch/_weights_only_unpickler.py`` of torch 2.6 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from ckptconv.checkpoint.safe_globals import (
    TENSOR_CLASSES,
    needed_import,
    refused_opcodes,
)
from ckptconv.checkpoint.torch_versions import Rules
from ckptconv.checkpoint.weights_only.objects import (
    BYTEARRAY,
    COUNTER,
    ORDERED_DICT,
    SET,
    UNKNOWN,
    AfterUnknown,
    Arguments,
    Contents,
    Held,
    Made,
    NotKnown,
    Objects,
    Reason,
    Refused,
    SizeValue,
    StorageValue,
    TensorValue,
    describe,
)
from ckptconv.checkpoint.weights_only.tensors import (
    REBUILD,
    Maker,
    bytearray_,
    check_gradient,
    complex_,
    counter,
    device,
    empty,
    encode,
    from_type,
    layout,
    ordered_dict,
    parameter,
    set_,
    set_view,
    size,
    sparse_of_class,
)
from ckptconv.limits import LIMITS
from ckptconv.pickles.graph import (
    Blob,
    Call,
    Dict,
    Effect,
    Extension,
    FrozenSet,
    Global,
    Graph,
    List,
    Node,
    Object,
    Py2String,
    Set,
    Tuple,
    Value,
    imported_name,
    walk,
)
from ckptconv.pickles.rows import RowCall, RowForm, outline
from ckptconv.work import work

#: Allowed classes whose objects have no attributes.
_BARE = ("builtins.set", "builtins.bytearray", "builtins.complex", "torch.Size", "torch.device")


def check_effect(target: Object, effect: Effect, objects: Objects) -> None:
    """Apply `effect` to the value of `target`.

    Raise Refused if torch's unpickler refuses it, and NotKnown if it may do so.
    """
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
    elif effect.opcode in ("SETITEM", "SETITEMS") and not objects.rules.since(2, 10):
        raise NotKnown(f"{effect.opcode} on {describe(held)}, which may corrupt memory")
    else:
        raise Refused(f"{effect.opcode} on {describe(held)}")


def _check_keys(effect: Effect, objects: Objects) -> None:
    """Raise Refused if Python cannot hash a key that `effect` sets."""
    for key in effect.values[::2]:
        if type(key) is not str:
            objects.check_hashable(key)


def _build(target: Object, held: Held, effect: Effect, objects: Objects) -> None:
    """Apply the BUILD `effect` to `target`, whose value is `held`.

    Raise Refused or NotKnown as :func:`check_effect` does.
    """
    state = effect.values[0]
    if isinstance(held, TensorValue):
        objects.made[id(target)] = _with_state(held, state, objects, effect.order)
    elif held is ORDERED_DICT:
        _check_attributes(state, objects, effect.order)
    elif held is COUNTER:
        if not objects.is_empty(state, effect.order):
            if isinstance(state, Tuple) and len(state.items) == 2:
                raise NotKnown("the slots of a Counter")
            _check_attributes(state, objects, effect.order)
    elif isinstance(held, Made) and held.cls in _BARE:
        if not objects.is_empty(state, effect.order):
            raise Refused(f"BUILD on {describe(held)}, which has no attributes")
    else:
        raise Refused(f"BUILD on {describe(held)}")


def _check_attributes(state: Value, objects: Objects, now: int | None) -> None:
    """Check that a dict of attributes can be updated with `state` at the step `now`.

    Raises Refused for numbers and None, and NotKnown for other values that are not empty or mappings.
    """
    if objects.is_mapping(state):
        return
    held = objects.held(state)
    if held is None or isinstance(held, (bool, int, float)):
        raise Refused(f"the attributes of an OrderedDict are {describe(held)}")
    if not objects.is_empty(state, now):
        raise NotKnown(f"the attributes of an OrderedDict are {describe(held)}")


def _with_state(tensor: TensorValue, state: Value, objects: Objects, now: int | None) -> TensorValue:
    """Return `tensor` after BUILD with `state` at the step `now`, in the form of torch before 0.4.

    Raises Refused or NotKnown for other states.
    """
    if not isinstance(state, Tuple):
        raise NotKnown("the state of a tensor that is not a tuple")
    args = Arguments(state.items, objects, now)
    if not tensor.is_parameter:
        return set_view(tensor, args)
    if not tensor.is_plain or len(state.items) in (4, 5):
        raise NotKnown("the state of a Parameter from torch before 0.4")
    if len(state.items) != 3:
        raise Refused(f"the state of a Parameter has {len(state.items)} parts")
    requires_grad = args.flag(0, "requires_grad")
    check_gradient(requires_grad, tensor.dtype)
    tensor.requires_grad = requires_grad
    return tensor


_AnObject = TypeVar("_AnObject", bound=Object)

#: The makers of the allowed globals that can be called.
MAKERS: dict[str, Maker] = {
    **REBUILD,
    "torch._tensor._rebuild_from_type_v2": from_type,
    "torch.nn.parameter.Parameter": parameter,
    "torch.Tensor": empty("float32"),
    "torch.Size": size,
    "torch.device": device,
    "torch.serialization._get_layout": layout,
    "collections.OrderedDict": ordered_dict,
    "collections.Counter": counter,
    "_codecs.encode": encode,
    "builtins.bytearray": bytearray_,
    "builtins.set": set_,
    "builtins.complex": complex_,
    **{f"torch.{name}": empty(dtype) for name, dtype in TENSOR_CLASSES.items()},
    **{f"torch.sparse.{name}": sparse_of_class for name in TENSOR_CLASSES if name != "BoolTensor"},
}
#: Classes whose ``__new__`` ignores its arguments.
_NEW = {
    "collections.OrderedDict": ORDERED_DICT,
    "collections.Counter": COUNTER,
    "builtins.set": SET,
    "builtins.bytearray": BYTEARRAY,
}
#: Classes for which NEWOBJ does the same as a call.
_MADE_AS_CALLED = ("torch.nn.parameter.Parameter", "torch.Tensor", "torch.Size", "torch.device", "builtins.complex")
_STORAGES = ("torch.storage.TypedStorage", "torch.storage.UntypedStorage")
_IN_ROWS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"}  # depend only on their arguments
_MORE_STEPS = 100_000  # allowed for a file of any size
_NO_UTF8 = "a byte string of Python 2 that is not UTF-8"
_LONG = "an integer of more than 255 bytes"
_STEPS = 8  # of work for the value of a call
_LONGEST_INT = 8 * 255 - 1  # LONG1 has one byte for the length, and the integer has a sign


def reasons(graph: Graph, contents: Contents | None = None, rules: Rules | None = None) -> Iterator[Reason]:
    """Yield the reasons why the unpickler would not load `graph`, in the opcodes of its source.

    If there are none, the unpickler loads the pickle with all its storages.

    Args:
        graph: The unedited graph from the parser.
        contents: The bytes that the graph refers to. If it is None, the result of steps that need bytes is not known.
        rules: The version of torch, or None for the newest.
    """
    for name in refused_opcodes(graph):
        yield Reason("refused", f"opcode {name}", is_spelling=True)
    for value in graph.byte_strings:
        if isinstance(value, Py2String) and value.text is None:
            yield Reason("refused", _NO_UTF8, value)
    run = _Run(graph, contents or Contents(), graph.written, rules)
    yield from run.globals(graph.globals)
    yield from run.steps(graph.outer_calls, graph.changed)


def obstacles(graph: Graph, nodes: list[Node] | None = None) -> Iterator[tuple[str, Value]]:
    """Yield the objects that the unpickler of every known version of torch refuses, in any spelling of `graph`.

    Args:
        graph: A graph, which may be edited.
        nodes: All nodes of the graph. None means to walk the graph without creating the nodes inside rows.

    Yields:
        The name of a global or a reason, and the node to which it applies.
    """
    nodes = list(walk([*graph.discarded, graph.root], parts=outline)) if nodes is None else nodes
    if _is_long(graph.root):
        yield _LONG, graph.root
    for node in nodes:
        for reason in _spelling(node):
            yield reason, node
    run = _Run(graph, Contents(), {}, Rules(keep=True))
    found = list(run.globals([node for node in nodes if isinstance(node, Global)]))
    calls = [node for node in nodes if isinstance(node, Call)]
    changed = [node for node in nodes if isinstance(node, Object) and node.effects]
    found += run.steps(calls, changed)
    yield from ((each.text, each.node) for each in found if each.known == "refused")
    for value in graph.discarded:
        if isinstance(value, Node):
            yield "a call whose result is discarded", value


def may_have_obstacles(graph: Graph) -> bool:
    """Return whether :func:`obstacles` may find anything, without walking `graph`.

    The result is True if the source contains a global or an opcode that the unpickler refuses, or a call whose
    result is discarded. Arguments are not checked. `graph` may be edited: edits add only calls that torch writes.
    """
    run = _Run(graph, Contents(), {}, Rules(keep=True))
    return bool(refused_opcodes(graph) or graph.discarded or next(run.globals(graph.globals), None))


def can_be_made_loadable(graph: Graph) -> bool:
    """Return whether the unpickler refuses `graph` only for its opcodes or its protocol.

    Then rewriting makes it loadable.
    """
    return (graph.protocol > 2 or bool(refused_opcodes(graph))) and next(obstacles(graph), None) is None


# Spelling


def _spelling(node: Node) -> Iterator[str]:
    """Yield the reasons why `node` cannot be written with the opcodes of the unpickler. There may be none."""
    if isinstance(node, Call) and node.kind not in ("REDUCE", "NEWOBJ"):
        yield "an object created by an opcode that torch does not support"
    elif isinstance(node, FrozenSet):
        yield "a frozenset"
    elif isinstance(node, Extension):
        yield "an extension code"
    elif (isinstance(node, Py2String) and len(node.data) > 255) or (isinstance(node, Blob) and node.kind != "str"):
        yield "a long byte string"
    elif isinstance(node, Py2String) and node.text is None:
        yield _NO_UTF8
    if isinstance(node, (Object, Tuple)) and any(type(part) is int and _is_long(part) for part in outline(node)):
        yield _LONG


def _is_long(value: Value) -> bool:
    """Return whether `value` is an integer of more than 255 bytes."""
    return type(value) is int and (value if value >= 0 else ~value).bit_length() > _LONGEST_INT


# Running


class _Run:
    """A pass of the unpickler over one graph.

    Args:
        graph: The graph.
        contents: The bytes that the graph refers to.
        written: The calls in the source of calls that a reader has replaced.
        rules: The version of torch, or None for the newest.
    """

    def __init__(
        self, graph: Graph, contents: Contents, written: Mapping[Call, Call], rules: Rules | None = None
    ) -> None:
        self.written = written
        self.objects = Objects(contents, self.make, 10 * graph.opcodes + _MORE_STEPS, rules or Rules())
        self.found: list[Reason] = []
        self.callables: dict[int, tuple[str, Maker | None]] = {}
        self.like: dict[RowForm, TensorValue] = {}  # the tensor of the first row of each form
        self.depth = 0
        self.is_unknown = False
        self.has_foreign = False

    def globals(self, nodes: list[Global]) -> Iterator[Reason]:
        """Yield a reason for each global in `nodes` that the unpickler does not accept."""
        for node in nodes:
            name = imported_name(node, 2)
            if self.objects.rules.allow(name):
                continue
            self.has_foreign = True
            if self.objects.rules.add(name):
                yield Reason("not known", f"the result of {name}", node)
            else:
                yield Reason("refused", str(node), node, needed_import(name))

    def steps(self, calls: list[Call], changed: list[Object]) -> list[Reason]:
        """Process `calls` and the effects on `changed`, in the order of the source. Return the reasons."""
        effects = [(target, effect) for target in changed for effect in self.form(target).effects]
        effects.sort(key=lambda each: each[1].order or 0)
        done = 0
        made = self.objects.made
        budget = work()
        for call in self.each(calls):
            order = self.form(call).order or 0
            while done < len(effects) and (effects[done][1].order or 0) < order:
                self.effect(*effects[done])
                done += 1
            if id(call) not in made:
                budget.charge(_STEPS)
                self.make(call)
        for target, effect in effects[done:]:
            self.effect(target, effect)
        if self.is_unknown and not self.found and not self.has_foreign:
            self.found.append(Reason("not known", "an object that a global or a persistent id names"))
        return self.found

    def each(self, calls: list[Call]) -> Iterator[Call]:
        """Yield `calls`, and before each row the calls inside it.

        A row is left out if a row of the same form was processed without a reason. Its value is determined when it
        is needed.
        """
        for call in calls:
            if not isinstance(call, RowCall):
                yield call
            elif (form := call.row) is None or form not in self.like:
                is_new = id(call) not in self.objects.made  # no effect has changed its value
                yield from call.calls()
                if form is not None and is_new:
                    self.compare(form, call)

    def compare(self, form: RowForm, call: RowCall) -> None:
        """Record the tensor of the row `call` as a model for other rows of its `form`.

        Rows of one form differ only in the key of the storage. Nothing is recorded if the value is not a tensor, or
        depends on more than the arguments.
        """
        *inside, tensor = (self.objects.made[id(each)] for each in call.calls())
        is_row = {imported_name(each, 2) for each in form.functions} <= _IN_ROWS and not self.written
        is_known = all(each is ORDERED_DICT or isinstance(each, TensorValue) for each in inside)
        if is_row and is_known and isinstance(tensor, TensorValue):
            self.like[form] = replace(tensor)  # a copy that no effect changes

    def form(self, target: _AnObject) -> _AnObject:
        """Return the call in the source that a reader has replaced by `target`, or `target` itself."""
        return self.written.get(target, target) if self.written else target  # type: ignore[call-overload]

    def make(self, call: Call) -> Held:
        """Determine, record and return the value of `call`.

        The value is UNKNOWN if the call is refused or not modelled.
        """
        made = self.objects.made
        if isinstance(call, RowCall) and (form := call.row) and (like := self.like.get(form)):
            assert like.storage is not None
            storage = StorageValue(like.storage.dtype, like.storage.nbytes, call.reference)
            made[id(call)] = value = replace(like, storage=storage)
            return value
        made[id(call)] = UNKNOWN  # a call can be an argument of itself
        self.depth += 1
        try:
            made[id(call)] = self.value_of(self.form(call))
        except (Refused, NotKnown) as why:
            function = self.form(call).callable
            self.add(why, call, f"{imported_name(function, 2)}: " if isinstance(function, Global) else "")
        self.depth -= 1
        return made[id(call)]

    def value_of(self, call: Call) -> Held:
        """Return the value of `call`. Raise Refused or NotKnown if it has none."""
        if self.depth > LIMITS.nested_calls:
            raise NotKnown("calls that are nested too deeply")
        known = self.callables.get(id(call.callable))
        if known is None:
            known = self.callables[id(call.callable)] = self.look_up(call.callable)
        name, maker = known
        args = self.arguments(call)
        if call.kind == "NEWOBJ" and name in _NEW:
            return _NEW[name]
        if call.kind == "NEWOBJ" and not (name in _MADE_AS_CALLED or name.endswith("Tensor")):
            maker = None
        if maker is None:
            raise NotKnown("a new storage") if name in _STORAGES else Refused("it cannot be called")
        return maker(args)

    def look_up(self, function: Value) -> tuple[str, Maker | None]:
        """Return the name of `function` and the function that determines the values of its calls.

        The second is None if `function` cannot be called. Raises Refused if `function` is not a global,
        AfterUnknown if the unpickler does not accept it, and NotKnown for a tensor class of CUDA.
        """
        if not isinstance(function, Global):
            held = self.objects.held(function)
            if held is UNKNOWN:
                raise AfterUnknown
            raise Refused(f"{describe(held)} is called")
        name = imported_name(function, 2)
        if not self.objects.rules.allow(name):  # the global has its own reason
            raise AfterUnknown
        if name.startswith("torch.cuda.") and name.endswith("Tensor"):
            raise NotKnown(f"{name} creates a tensor on a GPU, which needs a machine with one")
        return name, MAKERS.get(name)

    def arguments(self, call: Call) -> Arguments:
        """Return the arguments of `call`. Raise NotKnown or AfterUnknown if they are not a tuple or torch.Size."""
        if isinstance(call.args, Tuple):
            return Arguments(call.args.items, self.objects, call.order)
        held = self.objects.held(call.args)
        if isinstance(held, SizeValue):
            return Arguments([*held.sizes], self.objects, call.order)
        raise AfterUnknown if held is UNKNOWN else NotKnown("a call whose arguments are not a tuple")

    def effect(self, target: Object, effect: Effect) -> None:
        """Apply `effect` to `target`. Record a reason if this is refused or not modelled."""
        try:
            check_effect(target, effect, self.objects)
        except (Refused, NotKnown) as why:
            self.add(why, target, "")

    def add(self, why: Refused | NotKnown, node: Node, name: str) -> None:
        """Record the reason `why` for `node`. The text `name` is put before the reason.

        AfterUnknown is not recorded as a reason, because there is one already. It sets ``is_unknown``.
        """
        if isinstance(why, AfterUnknown):
            self.is_unknown = True
        else:
            self.found.append(Reason("refused" if isinstance(why, Refused) else "not known", f"{name}{why}", node))
