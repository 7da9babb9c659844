"""Issues with torch's safe loader: the objects that it refuses, their paths, and a part of the file that it loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.pickled_modules import PickledModule, detached
from ckptconv.checkpoint.safe_globals import needed_import, refused_opcodes
from ckptconv.checkpoint.state_dicts import StateDict
from ckptconv.errors import CkptconvError, at_path, count, size, some
from ckptconv.formats import opening
from ckptconv.formats.distributed.rank_names import about_one
from ckptconv.formats.sharded import index as sharded
from ckptconv.formats.writers import WRITERS
from ckptconv.hints import Option, literal, saved_by_torch
from ckptconv.inspection.diagnosis.findings import SHOWN, Fix, Issue, Scope
from ckptconv.light_dataclass import dataclass
from ckptconv.pickles.graph import Call, Dict, Global, List, Node, Value, imported_name, is_global, walk
from ckptconv.pickles.paths import Place, is_item
from ckptconv.safety.torch_load import NO_SAFETENSORS, Loading
from ckptconv.work import bounded

_PICKLE, _LEGACY = WRITERS["pickle"].name, WRITERS["legacy"].name
_MOST_DROPPED = 8  # items that one command leaves out
_LOCAL = "/.__state__[1]/_local_tensor"  # the path in a DTensor of the tensor of this process


@dataclass(frozen=True)
class LoadablePart:
    """A part of a checkpoint that torch's safe loader loads.

    Attributes:
        nodes: The nodes of the part.
        path: The path of the part, or None for the main state dict.
        nbytes: The bytes of its storages.
        module: The pickled module, if the part is its state dict. Otherwise None.
    """

    nodes: list[Node]
    path: str | None
    nbytes: int
    module: PickledModule | None = None


def refusals(
    scope: Scope, refused: Sequence[tuple[str, Value]], plain: tuple[Fix, str] | None
) -> tuple[list[Issue], LoadablePart | None, list[Issue]]:
    """Return the issues about objects that torch refuses, with a fix in the last issue.

    Args:
        scope: The checkpoint.
        refused: The result of :func:`what_is_refused`.
        plain: A fix that converts all refused objects to plain ones, with its description, or None. It is preferred to
            a fix that selects a part.

    Returns:
        The issues; the part that the fix selects, or None; and issues with other fixes.
    """
    found = Refused(scope.checkpoint, refused)
    if found.where and all(map(needed_import, found.where)):
        return [_to_import(found), *containers(scope.checkpoint)], None, []
    part = found.loadable_part()
    texts = []
    for word, (first, times) in islice(found.where.items(), SHOWN):
        more = f" and {count(times - 1, 'more place')}" if times > 1 else ""
        texts.append(f"torch.load(weights_only=True) refuses {word}{at_path(first)}{more}")
    if len(found.where) > SHOWN:
        texts.append(f"and {len(found.where) - SHOWN:,} more like that: {some(list(found.where)[SHOWN:])}")
    if scope.checkpoint.script_classes is not None:
        texts = ["it is a TorchScript archive, which torch.jit.load loads and torch.load does not"]
    unwanted = found.droppable() if scope.checkpoint.storages and scope.checkpoint.script_classes is None else []
    if unwanted and (part is None or part.nbytes < _total(scope.checkpoint)):
        part = None  # the complete file without the refused items
    fix, last = _fix(found, part, unwanted)
    others: list[Issue] = []
    if plain:
        others = [Issue("part", last, fix)] if fix else []
        (fix, last), part = plain, None
    issues = [Issue("code", text, blocks=True) for text in texts]
    issues[-1] = Issue("code", texts[-1] + "; " + last, fix, blocks=True)
    return [*issues, *containers(scope.checkpoint)], part, others


def _to_import(found: Refused) -> Issue:
    """Return the issue for globals that torch's safe loader accepts after an import of a module of torch or torchao."""
    modules = dict.fromkeys(needed_import(name) or "" for name in found.where)
    (name, (first, _)), *others = found.where.items()
    more = f" and {len(others):,} more" if others else ""
    after = f"only after `import {', '.join(modules)}`"
    text = f"torch.load(weights_only=True) takes {name}{at_path(first)}{more} in a fresh process {after}"
    return Issue("import", text, blocks=True)


def _total(checkpoint: Checkpoint) -> int:
    """Return the bytes of all storages of `checkpoint`."""
    return sum(storage.nbytes for storage in checkpoint.storages.values())


def _fix(found: Refused, part: LoadablePart | None, unwanted: Sequence[str]) -> tuple[Fix | None, str]:
    """Return a fix that selects `part`, or else leaves out the paths `unwanted`, and its description.

    The fix is None if both are empty.
    """
    checkpoint = found.checkpoint
    is_script = checkpoint.script_classes is not None
    if part is None and unwanted:
        fix = Fix("-loadable", part=(Option("drop", tuple(unwanted)),))
        what = "the file loads with every tensor" if found.has_globals else "which no option mends, the file loads"
        return fix, f"without {some(unwanted)}, {what}"
    if part is None and not found.has_globals and not is_script:
        return None, "no option mends it, or leaves out only that: load it with a version of torch that takes it"
    if part is None:
        nothing = "each part needs these classes: load it where their code is installed, and save its tensors"
        return None, "it has no state dict" if is_script else nothing
    share = f"{size(part.nbytes)} of {size(_total(checkpoint))}"
    left = found.left_out(part)
    lost = f", without {some(left, SHOWN)}" if left else ""
    select = () if part.path is None else (Option("select", part.path),)
    if part.module:
        what = "it" if part.module.path == "." else part.module.path
        text = f"{what} is a pickled model; only its state dict loads ({share}{lost})"
        return Fix("-weights", part=(*select, Option("state_dict"))), (
            f"only its state dict loads ({share})" if is_script else text
        )
    if part.path is None:
        return Fix("-weights", part=(Option("state_dict"),)), f"only the state dict loads ({share}{lost})"
    return Fix("-part", part=select), f"only {part.path} loads ({share}{lost})"


def what_is_refused(checkpoint: Checkpoint, loading: Loading) -> list[tuple[str, Value]]:
    """Return the objects in the graph that torch refuses, each with a reason before it.

    Refusals because of opcodes are not included. If the node is a global, the reason may be its name.
    """
    if any(reason.is_spelling for reason in loading.reasons):
        return checkpoint.index.obstacles
    refused = [reason for reason in loading.reasons if reason.known == "refused"]
    return [(reason.text, reason.node) for reason in refused if isinstance(reason.node, Node)]


def around(checkpoint: Checkpoint, loading: Loading) -> list[Issue]:
    """Return issues about the container: what torch refuses in it, or why the answer is not known."""
    refused = [each for each in loading.reasons if each.known == "refused" and each.text != NO_SAFETENSORS]
    if refused:
        fix = Fix("-readable") if all(reason.is_spelling for reason in refused) else None
        text = f"torch.load refuses it: {some([reason.text for reason in refused])}"
        return [Issue("container", text, fix, blocks=True)]
    if loading.answer != "not known":
        return []
    found = Refused(checkpoint, [(r.text, r.node) for r in loading.reasons if isinstance(r.node, Node)])
    texts = [reason.text for reason in loading.reasons if reason.node is None]
    texts += [word + at_path(path) for word, (path, _) in found.where.items()]
    return [Issue("not known", f"torch {loading.torch} may refuse the file: {some(texts)}")]


class Refused:
    """The objects of a checkpoint that torch's safe loader refuses.

    Args:
        checkpoint: The checkpoint.
        refused: Reasons, each with its node: obstacles of the index, or the result of :func:`what_is_refused`.

    Attributes:
        has_globals: Whether some are classes or functions. Otherwise torch refuses values, such as an invalid tensor.
        where: By reason, or by name for a global: the first path, and the number of paths.
    """

    def __init__(self, checkpoint: Checkpoint, refused: Sequence[tuple[str, Value]]) -> None:
        self.checkpoint = checkpoint
        self.nodes = [node for _, node in refused]
        self.has_globals = any(isinstance(node, Global) for node in self.nodes)
        self.uses = checkpoint.index.referrers
        self.where: dict[str, tuple[str, int]] = {}
        for reason, node in refused:
            word = imported_name(node, 2) if isinstance(node, Global) else reason
            place, more = self.uses.of(node)
            first, times = self.where.get(word) or (self.uses.path(place), 0)
            self.where[word] = first, times + 1 + more

    def loadable_part(self) -> LoadablePart | None:
        """Return a part that contains none of the refused objects, or None.

        It is the main state dict, or else the largest state dict, or else a part with more than half of all bytes.
        """
        tainted, detected = self.uses.above(self.nodes), self.checkpoint.detected
        meant = next(iter(detected.main()), None) if len(detected.main()) == 1 else None
        seen: set[int] = set()

        def sized(part: LoadablePart) -> LoadablePart:
            """Return `part` with its bytes. Each node counts for the first part only, and is visited once."""
            storages = self.checkpoint.index.storages_below(*part.nodes, seen=seen)
            return replace(part, nbytes=sum(storage.nbytes for storage in storages))

        modules = [
            LoadablePart([*map(detached, found.tensors.values())], found.path, 0, found) for found in detected.modules
        ]
        below = partial(walk, parts=self.checkpoint.index.parts)
        loadable = [part for part in modules if part.nodes and tainted.isdisjoint(map(id, below([*part.nodes])))]
        for part in loadable:
            if part.module is meant:
                return sized(replace(part, path=None))
        if isinstance(meant, StateDict) and id(meant.node) not in tainted:
            return sized(LoadablePart([meant.node], None, 0))
        state_dicts = [LoadablePart([f.node], f.path, 0) for f in detected.state_dicts if id(f.node) not in tainted]
        others = state_dicts or loadable or _other_parts(self.checkpoint, tainted)
        largest = max(map(sized, others), key=lambda part: part.nbytes, default=None)
        enough = 0 if state_dicts or loadable else _total(self.checkpoint) // 2
        return largest if largest and largest.nbytes > enough else None

    def left_out(self, part: LoadablePart) -> list[str]:
        """Return the paths of the root's items that are not in `part`."""
        kept = self.uses.above([part.module.place.node] if part.module else part.nodes)
        places = self.checkpoint.index.places_in_root()
        return [place.path for place in places if is_item(place) and id(place.node) not in kept]

    def droppable(self) -> list[str]:
        """Return the paths of items without which nothing is refused and no tensor is lost but invalid ones.

        Return an empty list if there are no such items, or more than 8.
        """
        refused, index = {id(node) for node in self.nodes}, self.checkpoint.index
        tainted, opened = self.uses.above(self.nodes), {0}
        unwanted: list[Place] = []
        for place in index.places:
            parent = id(place.parent.node) if place.parent else 0
            if id(place.node) not in tainted or parent not in opened:
                continue
            is_dict = isinstance(place.node, Call) and is_global(place.node.callable, "collections.OrderedDict")
            if (is_dict or isinstance(place.node, Dict)) and id(place.node) not in refused:
                opened.add(id(place.node))
            elif place.key is None:  # the removal of an element would renumber the others
                return []
            else:
                unwanted.append(place)
        gone = {id(place.node) for place in unwanted}
        roots = [index.root.node, *self.checkpoint.graph.discarded]
        kept = {id(node) for node in walk(roots, gone, index.parts)}
        tensors = {reference.storage for reference in self.checkpoint.references if id(reference.node) in kept}
        if (
            len(unwanted) > _MOST_DROPPED
            or not refused.isdisjoint(kept)
            or (self.has_globals and len(tensors) < len(self.checkpoint.storages))
        ):
            return []
        return [place.path for place in unwanted]


def partial_tensors(scope: Scope, refused: Sequence[tuple[str, Value]]) -> Iterator[Issue]:
    """Yield an issue about tensors of which the file contains only the part of one process, such as DTensors.

    If that part is the complete tensor, the issue has the code that saves plain tensors.
    """
    tensors = scope.checkpoint.tensors
    parts = {path: info for path, info in tensors.items() if info.kind == "partial"}
    if not parts:
        return
    text = f"{some([*parts])}: the file has one process's part, and no plain model takes a tensor of that kind; "
    local = [tensors.get(path + _LOCAL) for path in parts]
    needs = [needed_import(imported_name(node, 2)) if isinstance(node, Global) else None for _, node in refused]
    state_dict = _subscripts(scope.checkpoint)
    is_whole = all(part and part.shape == info.shape for part, info in zip(local, parts.values(), strict=True))
    if is_whole and state_dict is not None and None not in needs:
        loaded = f'torch.load({literal(scope.checkpoint.source.path)}, map_location="cpu"){state_dict}'
        each = 'getattr(tensor, "to_local", lambda tensor=tensor: tensor)()'
        text += "here each part is the whole: "
        text += saved_by_torch(f"{{name: {each} for name, tensor in {loaded}.items()}}", *sorted({*map(str, needs)}))
    elif merges := about_one(scope.checkpoint.source.path):
        text += merges
    else:
        text += (
            "in the run that has all parts, type on every rank `from torch.distributed.checkpoint.state_dict import"
            " StateDictOptions, get_model_state_dict; whole = get_model_state_dict(model,"
            " options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, and on rank 0"
            ' `torch.save(whole, "whole.pt")`'
        )
    yield Issue("partial", text)


def _subscripts(checkpoint: Checkpoint) -> str | None:
    """Return the Python subscripts that lead from the root to the main state dict, or None if there are none."""
    main = checkpoint.detected.main()
    if len(main) != 1 or not isinstance(main[0], StateDict):
        return None
    place = next(place for place in checkpoint.places if place.node is main[0].node)
    steps = [*place.upwards()][-2::-1]
    if not all(step.key is not None or step.segment.startswith("[") for step in steps):
        return None
    return "".join(step.segment if step.key is None else f"[{literal(step.key)}]" for step in steps)


def _other_parts(checkpoint: Checkpoint, tainted: set[int]) -> list[LoadablePart]:
    """Return the outermost containers without a `tainted` node that can be reached from the root through items only."""
    items: dict[int, bool] = {}
    found: list[LoadablePart] = []
    for place in checkpoint.places:
        parent = place.parent
        items[id(place)] = parent is None or (items[id(parent)] and is_item(place))
        if parent is None or not items[id(place)] or id(parent.node) not in tainted or id(place.node) in tainted:
            continue
        if isinstance(place.node, (Dict, List, Call)):
            found.append(LoadablePart([place.node], place.path, 0))
    return found


def nested(scope: Scope) -> Iterator[Issue]:
    """Yield issues about checkpoints inside byte strings. Commands read them only with ``select``."""
    graph = scope.checkpoint.graph
    if not graph.byte_strings and not any(is_global(each, "_codecs.encode") for each in graph.globals):
        return
    from ckptconv.formats.torch_files import files_in

    found = files_in(scope.checkpoint.index.every_place, scope.checkpoint.blobs or scope.checkpoint.source)
    for place, held in islice(found, SHOWN):
        text = f"{place.path} contains a checkpoint: a file of torch.save in a byte string ({size(held.size)})"
        yield Issue("nested", text, Fix("-inside", part=(Option("select", place.path),)))


def old_readers(checkpoint: Checkpoint) -> Iterator[Issue]:
    """Yield an issue if only torch 2.15 and newer can load a folder of torch.distributed.checkpoint."""
    if checkpoint.format != WRITERS["dcp"].name:
        return
    from ckptconv.formats.distributed.dcp import DcpFolder

    if isinstance(checkpoint.container, DcpFolder) and checkpoint.container.metadata.has_strides:
        text = "torch.distributed.checkpoint loads this folder since torch 2.15, and the converted one before"
        yield Issue("dcp", text, Fix("-any-torch", part=(Option("format", "dcp"),), format="dcp"))


def containers(checkpoint: Checkpoint) -> list[Issue]:
    """Return an issue if ``torch.load`` cannot read the container of the checkpoint, or an empty list."""
    if checkpoint.source.is_folder and not checkpoint.format.startswith(sharded.NAME):
        text = "the tensors are split over several files, and torch.load reads only one"
        return [Issue("parts", text, Fix("-whole"), blocks=True)]
    if checkpoint.format == _PICKLE:
        text = "it is a plain pickle: torch.load does not read it, and pickle.load has no map_location"
        return [Issue("pickle", text, Fix("-torch"), blocks=True)]
    if checkpoint.format == _LEGACY:
        from ckptconv.formats.torch_legacy import unreadable

        if lost := unreadable(checkpoint):
            text = f"torch writes {lost} to its format from before 1.6, and cannot read that back"
            return [Issue("legacy", text, Fix("-readable"), blocks=True)]
    return []


def opcodes(checkpoint: Checkpoint) -> list[Issue]:
    """Return an issue if torch refuses only the container or the opcodes, or warns of the protocol.

    Else an empty list.
    """
    if unread := containers(checkpoint):
        return unread
    graph = checkpoint.graph
    if unknown := refused_opcodes(graph):
        protocol = graph.protocol or "0 or 1"  # neither says which it is
        text = f"torch.load(weights_only=True) does not know {some(unknown)}, which pickle protocol {protocol} uses"
    elif graph.protocol > 2:
        text = f"it was saved with pickle protocol {graph.protocol}: torch.load(weights_only=True) prints a warning"
    else:
        return []
    return [Issue("opcodes", text, Fix("-loadable"), blocks=bool(unknown))]


def only_data(scope: Scope, refused: Sequence[tuple[str, Value]]) -> tuple[Fix, str] | None:
    """Return a fix that converts all `refused` objects to plain data, and its description. Return None if that fails.

    The file is read again to try the fix.
    """
    source = scope.checkpoint.source
    names = {imported_name(node, 2) for _, node in refused if isinstance(node, Global)}
    if not names or source.is_folder or scope.checkpoint.script_classes is not None:
        return None
    from ckptconv.edits.apply import apply
    from ckptconv.edits.loadable.table import BY_CLASS
    from ckptconv.edits.options import Edits

    if names.isdisjoint(BY_CLASS):
        return None
    try:
        with bounded(is_trial=True):
            changes = apply(opening.read_file(source), Edits(loadable=True))
    except CkptconvError:
        return None
    plain = count(len(changes.made_plain), "object")
    is_are = "is" if len(changes.made_plain) == 1 else "are"
    return Fix(
        "-plain", part=(Option("loadable"),)
    ), f"it is only data: after {plain} {is_are} converted, the file loads"
