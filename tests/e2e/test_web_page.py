"""The web page in Chromium saves the same files as the command line. The test needs Chromium and npm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.test_web import check_what_is_saved
from tests.support.web_page import built, program_of, served


@pytest.mark.slow
def test_chromium_saves_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved files of fifteen conversions equal the outputs of the commands that the page shows. Requests are
    blocked.
    """
    program_of("chrome")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    with served(built(tmp_path / "site")) as site:
        check_what_is_saved("chrome", site, tmp_path)
