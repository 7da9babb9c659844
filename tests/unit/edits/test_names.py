"""The grammar of prefixes."""

from __future__ import annotations

import pytest

from ckptconv.edits.names import normal_prefix
from ckptconv.errors import UsageError


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("module", "module."),
        ("module.", "module."),
        ("a.b", "a.b."),
        ("_orig_mod.module.", "_orig_mod.module."),
        ("модель", "модель."),
    ],
)
def test_module_means_module_dot(prefix: str, expected: str) -> None:
    """A prefix gets a trailing dot if it has none."""
    assert normal_prefix(prefix) == expected


@pytest.mark.parametrize("prefix", ["", ".", "..", ".module", "module..", "a..b"])
def test_invalid_prefixes(prefix: str) -> None:
    """A prefix with an empty segment is refused, and the error suggests ``--rename``."""
    with pytest.raises(UsageError, match="--rename"):
        normal_prefix(prefix)
