"""Empty replacements of NVIDIA's libraries, so that a CUDA build of torch can be imported on a machine without them.

Usage: ``python -m tests.support.empty_cuda VENV``. The program finds each shared library that torch's own libraries
need and that neither torch nor the system contains. It compiles a replacement with the required functions and the
versions of their symbols. The functions return an error. gcc and readelf are required. ``libcudart`` is not replaced,
because torch calls it during the import. ``.ci/versions`` copies ``libcudart`` from NVIDIA's small package.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

SYSTEM = re.compile(r"(lib(c|m|dl|pthread|rt|stdc\+\+|gcc_s|util|numa|z)|ld-linux.*)\.so.*")
#: Patterns of the beginnings of function names, by library. A function belongs to the first library whose pattern
#: matches.
FUNCTIONS = {
    "libcublasLt": "cublasLt",
    "libcublas": "cublas",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcurand": "curand",
    "libcusolver": "cusolver",
    "libcusparseLt": "cusparseLt",
    "libcusparse": "cusparse",
    "libnccl": "p?nccl",
    "libnvrtc": "nvrtc",
    "libcupti": "cupti",
    "libnvToolsExt": "nvtx",
    "libcufile": "cuFile",
    "libnvshmem_host": "nvshmem",
    "libnvJitLink": "nvJitLink",
    "libcuda": "cu[A-Z]",
}


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout


def empty(path: Path, functions: set[tuple[str, str]], versions: set[str]) -> None:
    """Compile a library at `path` with `functions`, each a name and a version, and with the symbol versions
    `versions`.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = sorted({name for name, _ in functions})
        source, script = Path(folder, "empty.c"), Path(folder, "versions")
        source.write_text(
            "int empty_cuda(void) {return 0;}\n" + "".join(f"int {n}(void) {{return 999;}}\n" for n in names)
        )
        command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(path), str(source), f"-Wl,-soname,{path.name}"]
        if versions:
            own = {each: "".join(f" {name};" for name, v in functions if v == each) for each in sorted(versions)}
            first = min(versions)
            script.write_text(
                "".join(f"{v} {{ global:{n}{' empty_cuda;' * (v == first)} }};\n" for v, n in own.items())
            )
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main(venv: Path) -> None:
    (torch,) = venv.glob("lib/python*/site-packages/torch")
    files = [*torch.glob("lib/*.so*"), *torch.glob("_C*.so")]
    needed: set[str] = set()
    versions = defaultdict[str, set[str]](set)
    functions = defaultdict[str, set[tuple[str, str]]](set)
    for path in files:
        needed |= {*re.findall(r"NEEDED.*\[(.*)\]", readelf("-d", path))}
        library = ""
        for line in readelf("-V", path).splitlines():
            if found := re.search(r" File: (\S+)", line):
                library = found[1]
            elif found := re.search(r" Name: (\S+)\s+Flags", line):
                versions[library].add(found[1])
        for name, version in re.findall(r" UND (\w+)(?:@+(\S+))?", readelf("--dyn-syms", path)):
            owner = next((each for each, pattern in FUNCTIONS.items() if re.match(pattern, name)), None)
            if owner:
                functions[owner].add((name, version))
    here = {path.name for path in files}
    for name in sorted(needed - here):
        if not SYSTEM.fullmatch(name) and not name.startswith("libcudart"):
            empty(torch / "lib" / name, functions[name.split(".so")[0]], versions[name])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
