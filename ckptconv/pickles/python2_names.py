"""The name that unpickling looks up for a global. Below protocol 3, Python 2's names become Python 3's."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

from ckptconv.pickles.graph import Global


def imported_name(node: Global, protocol: int) -> str:
    """Return ``module.name`` as it is looked up for `node` in a pickle of this `protocol`. Nothing is imported."""
    return ".".join(imported_as(node, protocol))


def imported_as(node: Global, protocol: int) -> tuple[str, str]:
    """Return the module and the name of :func:`imported_name`.

    Source: CPython's ``Lib/pickle.py``, ``_Unpickler.find_class``.
    """
    module, name = node.module, node.name
    if protocol < 3:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
    return module, name
