"""A program that runs tests with one version of torch or Python and stores the results in ``versions.tsv``, for
``.ci/versions``.

A row contains the version, the commit, the tests that ran, and the numbers of passed, failed and skipped tests. It also
contains the number of passed tests of the zoo (objects saved, converted and loaded by this torch), and the numbers of
mutants of ``tests/hostile/test_loads.py`` for which ckptconv claims more or less than this torch does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("versions.tsv")
PAGE = ROOT / "docs/policy.md"
HEAD = (
    "version",
    "commit",
    "run",
    "passed",
    "failed",
    "skipped",
    "zoo equal",
    "mutants",
    "over-claimed",
    "under-claimed",
)


def rows() -> dict[str, list[str]]:
    """Return the rows of the table, by version."""
    lines = TABLE.read_text().splitlines()[1:] if TABLE.exists() else []
    return {line.split("\t")[0]: line.split("\t") for line in lines}


def commit() -> str:
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "ckptconv"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def pytest(python: str, *arguments: str) -> str:
    """Run pytest with the interpreter `python`, and return its output, also if tests fail."""
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # some tests run the command ``python``
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ran.stdout[-6000:])
    return ran.stdout


def run(version: str, python: str, paths: list[str]) -> list[str]:
    """Run the tests at `paths` with the interpreter `python`, and return the row of `version`."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        out = pytest(python, "-n", str(os.cpu_count() or 1), f"--junitxml={report.name}", *paths)
        zoo = [
            not [*case] for case in ElementTree.parse(report.name).iter("testcase") if "test_zoo" in str(case.attrib)
        ]
    last = out.splitlines()[-1] if out else ""
    counts = [_number(last, word) for word in ("passed", "failed", "skipped")]
    mutants = os.environ.setdefault("CKPTCONV_MUTANTS", "2000")
    judged = pytest(python, "-s", "tests/hostile/test_loads.py")
    claims = [_number(judged, f"all: {claim}") for claim in ("loads, and torch refuses", "refused, and torch loads")]
    return [
        version,
        commit(),
        " ".join(paths),
        *counts,
        f"{sum(zoo)} of {len(zoo)}",
        mutants,
        *(claims if "mutants of" in judged else "??"),
    ]


def _number(text: str, what: str) -> str:
    """Return the number before `what` in `text`, or 0."""
    found = re.search(rf"([\d,]+) +{what}", text)
    return found[1].replace(",", "") if found else "0"


def page(found: dict[str, list[str]]) -> str:
    """Return the rows `found` in the form of the table in ``docs/policy.md``."""
    lines = [
        "| version | commit | tests | passed | failed | skipped | zoo equal | over-claimed | under-claimed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for version, commit, ran, *counts, _, over, under in found.values():
        name = f"Python {version[2:]}" if version.startswith("py") else f"torch {version}"
        cells = (name, commit, "all" if ran == "tests/unit tests/e2e" else "some", *counts, over, under)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def keep(row: list[str]) -> None:
    """Add `row` to the table, or replace the row of the same version, and update the page."""
    before = page(rows())
    every = {**rows(), row[0]: row}
    lines = [
        HEAD,
        *(every[version] for version in sorted(every, key=lambda word: [*map(int, re.findall(r"\d+", word))])),
    ]
    TABLE.write_text("".join("\t".join(line) + "\n" for line in lines))
    PAGE.write_text(PAGE.read_text().replace(before, page(rows())))


def needs() -> list[str]:
    """Return the packages that the tests need, except torch, and those that torch needs for its import."""
    import tomllib  # type: ignore[import-not-found]  # new in Python 3.11, which runs .ci/versions

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, extras = [*project["dependencies"]], ["test"]
    for extra in extras:
        for need in project["optional-dependencies"][extra]:
            if inner := re.fullmatch(r"ckptconv\[(.*)\]", need):
                extras += inner[1].split(",")
            else:
                found.append(need)
    own = "filelock typing-extensions sympy networkx jinja2 fsspec setuptools"
    return [*(need for need in found if not need.startswith("torch>")), *own.split()]


if __name__ == "__main__":
    asked, *arguments = sys.argv[1:]
    if asked == "--needs":
        print(*needs(), sep="\n")
        sys.exit()
    if asked == "--is-done":
        word, *paths = arguments
        sys.exit(rows().get(word, [])[1:3] != [commit(), " ".join(paths)])
    keep(run(asked, arguments[0], arguments[1:]))
    print(TABLE.read_text())
