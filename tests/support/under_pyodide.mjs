// Calls main(WORDS) of a module under Pyodide's Python: node under_pyodide.mjs PYODIDE REPOSITORY FOLDER MODULE WORDS...
// FOLDER is found at /given, and among the packages. The last line that is printed is what main returned, as JSON.
import path from "node:path";
import { pathToFileURL } from "node:url";

const [engine, repository, folder, name, ...words] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(path.resolve(engine), "pyodide.mjs")));
const python = await loadPyodide({ indexURL: path.resolve(engine) + "/", env: { HOME: "/tmp", PYTHONDONTWRITEBYTECODE: "1" } });
for (const [at, from] of [["/repository", repository], ["/given", folder]]) {
  python.FS.mkdirTree(at);
  python.mountNodeFS(at, path.resolve(from));
}
python.globals.set("name", name);
python.globals.set("words", python.toPy(words));
await python.runPythonAsync(`
import importlib, json, os, sys
sys.path[:0] = ["/given", "/repository"]
os.chdir("/repository")
print(json.dumps(importlib.import_module(name).main(list(words))))
`);
