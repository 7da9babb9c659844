"""The search of the site finds the page of an error from the complete message, as people paste it, with their own names
in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import ckptconv
from tests.support.paths import ROOT

#: Pasted messages, and the page in docs/fix with the command for each.
PASTED = {
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you "
    "are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your "
    "storages to the CPU.": "cuda-not-available",
    "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1. Please use "
    "torch.load with map_location to map your storages to an existing device.": "cuda-device-count",
    'RuntimeError: Error(s) in loading state_dict for ResNet: Missing key(s) in state_dict: "conv1.weight". Unexpected '
    'key(s) in state_dict: "module.conv1.weight", "module.bn1.weight".': "unexpected-module-prefix",
    'Unexpected key(s) in state_dict: "_orig_mod.transformer.wte.weight"': "orig-mod",
    'Unexpected key(s) in state_dict: "model.conv1.weight", "model.bn1.weight"': "unexpected-model-prefix",
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, "
    "do those steps only if you trust the source of the checkpoint.": "weights-only-load-failed",
    "WeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default. "
    "Please use `torch.serialization.add_safe_globals([Namespace])`": "weights-only-training",
    "ModuleNotFoundError: No module named 'ultralytics.nn.modules.conv'; it is not a package": "no-module-named",
    "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'predict.py'>": "cant-get-attribute",
    "_pickle.UnpicklingError: invalid load key, '<'.": "invalid-load-key",
    "EOFError: Ran out of input": "eof-error",
    "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
    "when loading them again: [{'lm_head.weight', 'model.embed_tokens.weight'}]": "tensors-share-memory",
    "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 2048]) from checkpoint, the shape in "
    "current model is torch.Size([10, 2048]).": "size-mismatch",
    "ModuleNotFoundError: No module named 'numpy._core'": "numpy-core",
    "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer": "safetensors-header",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 16777216 bytes.": "killed",
    "KeyError: 'state_dict'": "unexpected-model-key",
    "_pickle.UnpicklingError: pickle data was truncated": "pickle-truncated",
    "OSError: Unable to load weights from pytorch checkpoint file for 'pytorch_model.bin' at 'pytorch_model.bin'. If "
    "you tried to load a PyTorch model from a TF 2.0 checkpoint, please set from_tf=True.": "central-directory",
}

#: Runs the search's own scripts with a minimal page. Prints the pages found for each text, best first.
_SEARCH = """
const fs = require("fs"), vm = require("vm"), [, , site, ...texts] = process.argv;
const ready = [], page = { getElementById: () => ({}), readyState: "loading",
  addEventListener: (_, listener) => ready.push(listener) };
const room = vm.createContext({ document: page, location: {}, localStorage: { setItem() {} }, console,
  URLSearchParams, DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text,
  _ready: () => {}, _removeChildren: () => {} });
room.window = room;
for (const name of ["_static/search.js", "_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${name}`, "utf8"), room);
ready.forEach((listener) => listener());
console.log(JSON.stringify(texts.map((text) => {
  room.location.search = "?q=" + encodeURIComponent(text);
  room.text = text;
  const found = vm.runInContext("Search._performSearch(...Search._parseQuery(text))", room);
  return [...new Set(found.reverse().map((result) => result[0]))];
})));
"""


@pytest.mark.skipif(not (shutil.which("sphinx-build") and shutil.which("node")), reason="needs Sphinx and Node.js")
def test_a_pasted_error_leads_to_its_page(tmp_path: Path) -> None:
    """The page of each error is the first or the second result."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(["sphinx-build", "-q", "-W", "docs", str(tmp_path)], cwd=ROOT, check=True, env=env, timeout=300)
    for page in ("index.html", "fix/killed.html"):
        assert f"ckptconv {ckptconv.__version__}" in (tmp_path / page).read_text(), "it says its version"
    program = tmp_path / "search.cjs"
    program.write_text(_SEARCH)
    ended = subprocess.run(
        ["node", str(program), str(tmp_path), *PASTED], capture_output=True, text=True, check=True, timeout=60
    )
    found = zip(PASTED.values(), json.loads(ended.stdout), strict=True)
    assert [page for page, pages in found if f"fix/{page}" not in pages[:2]] == []
