"""Build the page that converts checkpoints in the browser: ``python -m web.build [FOLDER]``.

Without `FOLDER`, the page is written to the folder from which the documentation copies it. Pyodide comes from npm, with
the version and SHA-512 below. Node compiles the modules for the Python of Pyodide. The result contains all files that
the page loads, and works below any URL. The service worker of the page sends the HTTP headers. ``_headers`` contains
the same headers for hosts that can send them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ckptconv
from ckptconv.render.page import hashes

__all__ = ["build", "published"]

PACKAGE = "pyodide@314.0.7"
INTEGRITY = "sha512-0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
HERE = Path(__file__).parent
#: Modules of the standard library that are left out: for networks, terminals, databases and development.
LEFT_OUT = """
    _pydatetime _pyio _pydecimal _pyrepl _strptime _sysconfigdata__emscripten_wasm32-emscripten antigravity argparse
    asyncio/__main__ asyncio/proactor_events asyncio/tools asyncio/windows_events asyncio/windows_utils bdb cProfile
    calendar cmd code concurrent/futures/process concurrent/interpreter configparser csv ctypes/macholib ctypes/util
    curses dbm doctest email ensurepip filecmp fileinput fractions ftplib getopt getpass gettext graphlib html/parser
    http idlelib imaplib importlib/metadata ipaddress lib2to3 logging/config logging/handlers mailbox mailcap mimetypes
    modulefinder multiprocessing netrc nturl2path optparse pdb pickletools plistlib poplib pprint profile profiling
    pstats pty py_compile pyclbr pydoc pydoc_data pyodide/console rlcompleter runpy sched secrets shelve smtplib
    socketserver sqlite3 statistics stringprep symtable sysconfig/__main__ tabnanny test this timeit tkinter tomllib
    trace tracemalloc turtle turtledemo unittest urllib/request urllib/robotparser uuid venv wave webbrowser wsgiref xml
    xmlrpc zipapp zoneinfo
"""
#: The encodings that Python itself may need; the package uses no others.
ENCODINGS = "__init__ aliases ascii cp437 latin_1 raw_unicode_escape unicode_escape utf_8 utf_8_sig utf_16 utf_32"
#: Modules of the package that are left out: they need a terminal, a network, torch, processes or a disk.
NOT_HERE = """
    __main__ byteranges/histograms byteranges/kernels/casting byteranges/kernels/comparing byteranges/kernels/gathering
    byteranges/kernels/numbers byteranges/scaling byteranges/summing cli conversion/batches conversion/convert
    conversion/in_place conversion/jobs conversion/process_pool conversion/worker formats/in_place
    inspection/verification output/in_place output/signals render/notebook render/sarif render/schemas stores/fsspec
    stores/http stores/remote stores/requests stores/s3 stores/uploads stores/urls tensors
"""
#: The files of the page itself, in the order in which they are loaded, and their content types.
SHELL = {"index.html": "text/html; charset=utf-8", "page.css": "text/css; charset=utf-8"} | dict.fromkeys(
    ("page.mjs", "worker.mjs", "pyodide.mjs", "pyodide.asm.mjs"), "text/javascript; charset=utf-8"
)
#: Files that the worker gets as bytes, when the user first reaches the field.
ENGINE = ("pyodide.asm.wasm.gz", "python_stdlib.zip.gz", "ckptconv.zip.gz")


def build(folder: Path) -> dict[str, int]:
    """Write the page to `folder`. Return the number of bytes that a host sends for each file; text is compressed.

    Raises:
        OSError: npm or node is not installed.
        subprocess.CalledProcessError: npm or node failed.
        ValueError: The package from npm has another hash.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        engine, sources = Path(work) / "engine", Path(work) / "lib"
        for name, data in published(PACKAGE, INTEGRITY).items():
            to = engine / name.removeprefix("package/")
            to.parent.mkdir(exist_ok=True)
            to.write_bytes(data)
        with zipfile.ZipFile(engine / "python_stdlib.zip") as library:
            library.extractall(sources)
        jobs = Path(work) / "jobs.json"
        jobs.write_text(json.dumps({"python_stdlib.zip": _library(sources), "ckptconv.zip": _package()}))
        subprocess.run(["node", HERE / "compile.mjs", engine, jobs, folder], check=True, timeout=300)
        shutil.move(engine / "pyodide.asm.wasm", folder)
        for name in ENGINE:
            whole = folder / name.removesuffix(".gz")
            (folder / name).write_bytes(gzip.compress(whole.read_bytes(), 9, mtime=0))
            whole.unlink()
        for name in ("pyodide.mjs", "pyodide.asm.mjs"):
            text = (engine / name).read_text("utf-8")
            (folder / name).write_text(text.partition("\n//# sourceMappingURL=")[0] + "\n", "utf-8")
        lock = json.dumps({"info": json.loads((engine / "pyodide-lock.json").read_text())["info"], "packages": {}})
    policies = _policies()
    sizes = {name: (folder / name).stat().st_size for name in ENGINE}
    values = {
        "policy": policies["page"],
        "version": ckptconv.__version__,
        "lock": lock,
        "engine": json.dumps(ENGINE),
        "sizes": json.dumps(sizes),
        "megabytes": f"{(sum(sizes.values()) + _sent(folder / 'pyodide.asm.mjs')) / 1e6:.1f}",
    }
    for name in ("index.html", "page.css", "page.mjs", "worker.mjs"):
        _fill(name, folder, values)
    types = SHELL | dict.fromkeys(ENGINE, "application/octet-stream")
    files: dict[str, dict[str, Any]] = {
        name: {
            "integrity": f"sha256-{_base64(hashlib.sha256((folder / name).read_bytes()).digest())}",
            "headers": {
                "content-type": kind,
                "content-security-policy": policies["worker" if "worker" in name or "pyodide" in name else "page"],
                "referrer-policy": "no-referrer",
                "x-content-type-options": "nosniff",
            },
        }
        for name, kind in types.items()
    }
    said = json.dumps(files, indent=1)
    version = f"{ckptconv.__version__} {hashlib.sha256(said.encode()).hexdigest()[:16]}"
    _fill("sw.js", folder, {"files": said, "shell": json.dumps([*SHELL]), "version": version})
    headers = {name: each["headers"] for name, each in files.items()} | {"": files["index.html"]["headers"]}
    lines = [
        f"/{name}\n" + "".join(f"  {key}: {value}\n" for key, value in said.items()) for name, said in headers.items()
    ]
    (folder / "_headers").write_text("".join(lines))
    return {path.name: _sent(path) for path in sorted(folder.iterdir()) if path.name != "_headers"}


def published(package: str, integrity: str) -> dict[str, bytes]:
    """Return the files of the npm package `package`, by their names in the archive.

    Args:
        package: The name and version.
        integrity: The hash of the archive, as npm writes it in lock files.

    Raises:
        OSError: npm is not installed.
        subprocess.CalledProcessError: npm could not get the package.
        ValueError: The archive has another hash.
    """
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["npm", "pack", package], cwd=work, check=True, capture_output=True, timeout=60)
        (archive,) = Path(work).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != integrity:
            raise ValueError(f"{package} is not what it was: sha512-{digest}")
        with tarfile.open(archive) as opened:
            return {member.name: file.read() for member in opened if (file := opened.extractfile(member))}


def _library(sources: Path) -> dict[str, str]:
    """Return the modules of the standard library that the page needs, by their paths in the archive."""
    taken = _taken(sources, LEFT_OUT)
    encodings = tuple(f"encodings/{name}.py" for name in ENCODINGS.split())
    return {name: source for name, source in taken.items() if not name.startswith("encodings/") or name in encodings}


def _package() -> dict[str, str]:
    """Return the bridge, and the modules and data of ckptconv that work without a terminal, a network and torch."""
    taken = _taken(HERE.parent / "ckptconv", NOT_HERE)
    return {f"ckptconv/{name}": source for name, source in taken.items()} | {"bridge.py": str(HERE / "bridge.py")}


def _taken(folder: Path, left_out: str) -> dict[str, str]:
    """Return the files of `folder` by their relative paths, without the modules and packages in `left_out`."""
    names = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    out = tuple(f"{each}{end}" for each in left_out.split() for end in ("/", ".py"))
    return {name: str(path) for name, path in names.items() if not name.startswith(out) and path.suffix != ".pyc"}


def _policies() -> dict[str, str]:
    """Return the content security policies of the page and of its worker.

    They allow the script and style of the pages of ``inspect --html`` by their hashes.
    """
    script, style = hashes()
    least = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return {
        "page": f"{least}; script-src 'self' '{script}'; style-src 'self' '{style}'; connect-src 'self';"
        " worker-src 'self'; img-src data:",
        "worker": f"{least}; script-src 'self' 'wasm-unsafe-eval'; connect-src 'none'",
    }


def _fill(name: str, folder: Path, values: dict[str, str]) -> None:
    """Copy the file `name` to `folder`. Each key of `values` in double braces is replaced by its value."""
    text = (HERE / name).read_text("utf-8")
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    (folder / name).write_text(text, "utf-8")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _sent(path: Path) -> int:
    """Return the number of bytes that a host sends for the file `path`."""
    data = path.read_bytes()
    return len(data) if path.suffix == ".gz" else len(gzip.compress(data, 9))


if __name__ == "__main__":
    sent = build(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "dist" / "page")
    for name, nbytes in sorted(sent.items(), key=lambda item: -item[1]):
        print(f"{nbytes:>10,}  {name}")
    print(f"{sum(sent.values()):>10,}  in all")
