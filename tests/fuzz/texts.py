"""Targets whose input is or contains a text: rules and sizes, undo journals, URLs, indexes, names on pages, and
commands.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

from ckptconv.byteranges.undo_journal import _LENGTH, DONE, HOT, MAGIC, journal_path, state_of
from ckptconv.conversion.in_place import undo
from ckptconv.conversion.options import OutputOptions
from ckptconv.conversion.plan import make_plan
from ckptconv.edits.options import edits_from
from ckptconv.errors import CkptconvError, redacted
from ckptconv.formats import opening
from ckptconv.formats.opening import open_input
from ckptconv.hints import shell
from ckptconv.inspection.summary import summary_of
from ckptconv.render.page import page_of
from ckptconv.render.page.summary import summary_data
from ckptconv.stores import is_url, locate
from tests.fuzz import folders

__all__ = [
    "INDEX", "JOURNAL", "MODEL", "RULES", "SIZES", "check_index", "check_journal", "check_page", "check_rules",
    "check_shell", "check_url",
]  # a table  # fmt: skip

MODEL, RULES, SIZES = "model.safetensors", "x.rules", "sizes.json"
JOURNAL = "a.pt"
INDEX = "model.safetensors.index.json"
_TEXT = re.compile(rb"[^\n]{1,400}")


def check_rules(data: bytes, folder: Path) -> bool:
    """Make a plan with the rules and sizes in a folder. Return False if it is refused with a printable error."""
    path = _unpacked(data, folder)
    files = {name: [str(path / name)] for name in (RULES, SIZES) if (path / name).exists()}
    try:
        edits = edits_from(rules=files.get(RULES, []), sizes=files.get(SIZES, []))
        with open_input(path / MODEL) as source:
            make_plan(opening.read(source), folder / "out.safetensors", edits, OutputOptions(force=True))
    except CkptconvError as error:
        _check_line(error)
        return False
    return True


def check_journal(data: bytes, folder: Path) -> bool:
    """Undo the change of a file with its journal. Fail if a refused journal changes the file, or an accepted one its
    tensors.
    """
    path = _unpacked(data, folder)
    file = path / JOURNAL
    if not file.exists():
        return False
    if (journal := journal_path(file)).exists():
        journal.write_bytes(_mended(journal.read_bytes(), file.stat().st_ino))
    before, tensors = file.read_bytes(), _records(file)
    try:
        assert state_of(file) in (None, HOT, DONE), "no state of a journal"
        undo(file)
    except CkptconvError as error:
        _check_line(error)
        assert file.read_bytes() == before, "a refused journal changed the file"
        return False
    assert tensors is None or _records(file) == tensors, "a journal changed tensors"
    return True


def _mended(journal: bytes, inode: int) -> bytes:
    """Return `journal` for the file with this `inode`, with a correct checksum."""
    start = len(MAGIC) + len(HOT)
    body = journal[start:-32]
    if len(body) < _LENGTH.size:
        return journal
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    header = re.sub(rb'"inode": *[0-9]+', b'"inode": %d' % inode, body[_LENGTH.size : end])
    body = _LENGTH.pack(len(header)) + header + body[end:]
    return journal[:start] + body + hashlib.sha256(MAGIC + body).digest()


def _records(file: Path) -> dict[str, bytes] | None:
    """Return the storages in the archive `file`, or None if it is not an archive."""
    try:
        with zipfile.ZipFile(file) as opened:
            return {name: opened.read(name) for name in opened.namelist() if "/data/" in name}
    except Exception:  # zipfile raises many kinds of exceptions
        return None


def check_url(data: bytes, folder: Path) -> bool:
    """Fail if a password is shown, or if a refused text has no printable error. Return whether the text is a URL."""
    del folder
    text = data.decode("utf-8", "surrogateescape")
    shown = redacted(text)
    url = text.partition("http://u:S3CRET@h/")
    if text.isprintable() and not url[0] and "u:S3CRET@h" not in url[2]:  # a path may contain any text
        assert "u:S3CRET@h" not in shown, "a password is shown"
    try:
        locate(text)
    except CkptconvError as error:
        _check_line(error)
        return False
    return is_url(text)


def check_index(data: bytes, folder: Path) -> bool:
    """Fail if an index behind a URL leads to a file in another folder."""
    import fsspec  # an extra

    files, asked = fsspec.filesystem("memory"), set[str]()
    files.store.clear()
    near, shards = "/a/run", folders.unpack(data)
    for name in shards:
        files.pipe(f"{near}/{name}", shards[name])
    files.pipe("/a/x.safetensors", _named(["secret"]))

    def seen(store: object, path: str) -> object:
        asked.add(path)
        return info(store, path)

    info = type(files).info  # each thread has a separate instance
    with mock.patch.object(type(files), "info", seen):
        try:
            summary = summary_of(locate(f"memory:/{near}/{INDEX}"))
        except CkptconvError as error:
            _check_line(error)
            return False
        finally:
            assert all(path.rpartition("/")[0] == near for path in asked), f"a file elsewhere was asked for: {asked}"
    return bool(summary.tensors)


def check_shell(data: bytes, folder: Path) -> bool:
    """Fail unless a printed command is one line, which a shell splits into the original words."""
    del folder
    words = [os.fsdecode(each) for each in data.split(b"\0") if each]
    line = shell(*words)
    assert line.isprintable(), "a command would move the cursor"
    bash = shutil.which("bash")
    if not words or not bash:
        return bool(words)
    # A restricted shell without PATH: with wrong quotes, no program can run and no file can be written.
    ran = subprocess.run([bash, "--norc", "-r", "-c", f"printf '%s\\0' {line}"], capture_output=True, env={"PATH": ""})
    assert ran.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in words], "a shell reads other words"
    return True


def check_page(data: bytes, folder: Path) -> bool:
    """Fail if the names of tensors change the elements of a page or notebook."""
    names = dict.fromkeys(each.decode("utf-8", "replace") for each in _TEXT.findall(data))
    file = folder / MODEL
    file.write_bytes(_named(list(names)))
    try:
        summary = summary_of(file)
    except CkptconvError as error:
        _check_line(error)
        return False
    page, notebook = _plain(folder / "plain.safetensors")
    assert _tags(page_of(summary_data(summary))) == page, "a name has become a part of the page"
    assert set(_tags(summary._repr_html_())) <= set(notebook), "a name has become a part of the notebook"
    return True


def _named(names: list[str]) -> bytes:
    """Return a safetensors file with an empty tensor for each of `names`."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    return len(header).to_bytes(8, "little") + header


@cache
def _plain(file: Path) -> tuple[list[str], list[str]]:
    """Return the elements of the page and of the notebook for one tensor named ``a``. The checkpoint is written to
    `file`.
    """
    file.write_bytes(_named(["a"]))
    summary = summary_of(file)
    return _tags(page_of(summary_data(summary))), _tags(summary._repr_html_())


def _tags(page: str) -> list[str]:
    """Return the elements of `page` with the names of their attributes."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append(" ".join([tag, *(name for name, _ in attrs)]))  # type: ignore[method-assign]
    parser.feed(page)
    return found


def _unpacked(data: bytes, folder: Path) -> Path:
    """Write the files in `data` to a folder, and return it."""
    path = folder / "input"
    path.mkdir()
    folders.write(folders.unpack(data), path)
    return path


def _check_line(error: CkptconvError) -> None:
    line = str(error)
    assert line.isprintable() and len(line) < 40_000, "an error is no printable line"
