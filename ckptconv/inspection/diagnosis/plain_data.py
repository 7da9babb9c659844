"""The fix of files in which all that torch's safe loader refuses is data that can become plain."""

from __future__ import annotations

from collections.abc import Sequence

from ckptconv.byteranges.sources import SourceFolder
from ckptconv.errors import CkptconvError, count
from ckptconv.formats import opening
from ckptconv.hints import Option
from ckptconv.inspection.diagnosis.findings import Fix, Scope
from ckptconv.pickles.graph import Global, Value, imported_name


def only_data(scope: Scope, refused: Sequence[tuple[str, Value]]) -> tuple[Fix, str] | None:
    """What makes everything `refused` plain, and what to say of it, if that can be: which is tried, on the file read
    once more.
    """
    source = scope.checkpoint.source
    names = {imported_name(node, 2) for _, node in refused if isinstance(node, Global)}
    if not names or isinstance(source, SourceFolder) or scope.checkpoint.script_classes is not None:
        return None
    from ckptconv.edits.apply import apply  # all edits, which files do without of which nothing is refused
    from ckptconv.edits.loadable.table import BY_CLASS
    from ckptconv.edits.options import Edits

    if names.isdisjoint(BY_CLASS):
        return None
    try:
        changes = apply(opening.read_file(source), Edits(loadable=True))
    except CkptconvError:
        return None
    plain = count(len(changes.made_plain), "object")
    return Fix(
        "-plain", part=(Option("loadable"),)
    ), f"what torch refuses is only data: {plain} made plain, all of it loads"
