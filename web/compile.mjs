// Compiles Python modules with the Python of Pyodide: node compile.mjs PYODIDE JOBS OUT
// JOBS is a JSON file. For each archive it maps the paths of the modules in the archive to the paths of their sources.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [engine, jobs, out] = process.argv.slice(2).map((each) => path.resolve(each));
const { loadPyodide } = await import(pathToFileURL(path.join(engine, "pyodide.mjs")));
const python = await loadPyodide({ indexURL: engine, env: { HOME: "/", PYTHONNODEBUGRANGES: "1" } });
const archives = JSON.parse(fs.readFileSync(jobs, "utf8"));
python.globals.set("read", (file) => new Uint8Array(fs.readFileSync(file)));
const made = python.runPython(`
import importlib._bootstrap_external as loading, importlib.util, io, zipfile

def archive(files):
    """Return a zip of `files`. Modules are compiled without docstrings, and their sources are never checked."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, source in sorted(files.items()):
            data = read(source).to_bytes()
            if name.endswith(".py"):
                code = compile(data, name, "exec", dont_inherit=True, optimize=2)
                data, name = loading._code_to_hash_pyc(code, importlib.util.source_hash(data), False), name + "c"
            made.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()

archive
`);
try {
  for (const [name, files] of Object.entries(archives)) {
    fs.writeFileSync(path.join(out, name), made(python.toPy(files)).toJs());
  }
} catch (error) { // node would print the whole script of a megabyte
  console.error(error.message);
  process.exit(1);
}
