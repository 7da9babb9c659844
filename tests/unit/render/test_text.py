"""Sizes as people read them."""

from __future__ import annotations

import pytest

from ckptconv.render.text import size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2_147_483_648, "2.15 GB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes_are_decimal(nbytes: int, text: str) -> None:
    """Three digits and the units of disks and of the Hub."""
    assert size(nbytes) == text
