"""The page that converts in the browser saves what the command line writes: in Chromium, where it and npm are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.test_web import check_what_is_saved
from tests.support.web_page import built, program_of, served


@pytest.mark.slow
def test_chromium_saves_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen conversions, each byte for byte, by the command that the page shows; requests are blocked."""
    program_of("chrome")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    with served(built(tmp_path / "site")) as site:
        check_what_is_saved("chrome", site, tmp_path)
