// Compiles Python for the browser, in the Python that will run it there: node compile.mjs PYODIDE JOBS OUT
// JOBS is a JSON file: for each archive its name, and for each module the path in the archive and that of its source.
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
    """Of modules the bytecode without docstrings and columns, never compared with a source; the rest as it is."""
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
} catch (error) { // which node would print with the megabyte of script that it comes from
  console.error(error.message);
  process.exit(1);
}
