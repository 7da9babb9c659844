// Runs tests under Pyodide's Python, with the limits of a browser: node under_pyodide.mjs PYODIDE REPOSITORY PACKAGES WORDS...
// PACKAGES is a folder with pytest and what it needs; WORDS are pytest's. Its last line is JSON: how each test ended.
import path from "node:path";
import { pathToFileURL } from "node:url";

const [engine, repository, packages, ...words] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(path.resolve(engine), "pyodide.mjs")));
const python = await loadPyodide({ indexURL: path.resolve(engine) + "/", env: { HOME: "/tmp", PYTHONDONTWRITEBYTECODE: "1" } });
for (const [at, from] of [["/repository", repository], ["/packages", packages]]) {
  python.FS.mkdirTree(at);
  python.mountNodeFS(at, path.resolve(from));
}
python.globals.set("words", words.join("\n"));
await python.runPythonAsync(`
import collections, json, os, sys
sys.path[:0] = ["/packages", "/repository"]
os.chdir("/repository")
import pytest
from ckptconv.limits import lower
from tests.support.absent import Absent

for name in ("torch", "numpy", "safetensors"):
    sys.meta_path.insert(0, Absent(name))
lower(nesting=400)

class Counted:
    """How many tests ended how."""
    found = collections.Counter()
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.found[report.outcome] += 1
    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self.found["files " + report.outcome] += 1

pytest.main([*words.split("\\n"), "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short",
    "--import-mode=importlib", "--continue-on-collection-errors", "--basetemp=/tmp/tests"], [Counted()])
print(json.dumps(Counted.found))
`);
