"""torch in a separate process with a memory limit, for files that can kill the process that loads them.

Files are always loaded with ``weights_only=True`` and ``mmap=False``. An input line is JSON: the paths of two files
(the second can be null) and the tensors that ckptconv finds in the first file. An output line contains ``first`` and
``second``, the errors with which torch refuses the files, and ``difference``, the first difference. Each can be null.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

__all__ = ["TorchProcess"]

_SECONDS = 60  # limit for one pair of files
_ADDRESS_SPACE = 8 << 30  # in bytes; importing torch takes a part of it


class TorchProcess:
    """A context manager that runs the process, and starts a new one if it has ended.

    ``ended`` counts the inputs that ended a process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.ended = 0

    def __enter__(self) -> TorchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def compare(self, first: Path, second: Path | None, tensors: dict[str, list[Any]] | None) -> dict[str, str | None]:
        """Return torch's answer for `first` and `second`. `tensors` maps paths to the dtype, shape, stride and offset
        that are expected in `first`.
        """
        if self._process is None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.support.torch_process"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([str(first), second and str(second), tensors]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _SECONDS)
        answer = process.stdout.readline() if ready else ""
        if answer:
            found: dict[str, str | None] = json.loads(answer)
            return found
        self.ended += 1
        self._end()
        return {"first": "the process ended", "second": None, "difference": None}

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _compared(first: str, second: str | None, tensors: dict[str, list[Any]] | None) -> dict[str, str | None]:
    """Return the answer of :meth:`TorchProcess.compare`."""
    from tests.support.judge import assert_same

    a, why = _loaded(first)
    if why or second is None:
        return {"first": why, "second": None, "difference": None}
    b, why = _loaded(second)
    if why:
        return {"first": None, "second": why, "difference": None}
    try:
        assert_same(a, b)
        for path, expected in (tensors or {}).items():
            found = _facts(a, path)
            assert found in (None, expected), (path, found, expected)
    except Exception as error:
        return {"first": None, "second": None, "difference": f"{type(error).__name__}: {str(error)[:500]}"}
    return {"first": None, "second": None, "difference": None}


def _loaded(path: str) -> tuple[Any, str | None]:
    """Return the object in `path` and None, or None and the error."""
    import torch

    from tests.support.judge import forget_sparse

    forget_sparse()
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=False), None
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error)[-600:]}"


def _facts(obj: Any, path: str) -> list[Any] | None:
    """Return the dtype, shape, stride and offset of the plain tensor at `path`.

    Return None if the path does not consist of only keys and indices, or if the object is not a plain tensor.
    """
    import torch

    for segment in path.split("/") if path != "." else ():
        key, *indices = segment.split("[")
        if not isinstance(obj, dict) or key not in obj:
            return None
        obj = obj[key]
        for index in indices:
            number = index.removesuffix("]")
            if not isinstance(obj, (list, tuple)) or not number.isdecimal() or int(number) >= len(obj):
                return None
            obj = obj[int(number)]
    if (
        not isinstance(obj, torch.Tensor)
        or obj.layout != torch.strided
        or obj.is_meta
        or obj.is_nested
        or obj.is_quantized
    ):
        return None
    return [str(obj.dtype).removeprefix("torch."), [*obj.shape], [*obj.stride()], obj.storage_offset()]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            print(json.dumps(_compared(*json.loads(line))), file=answers, flush=True)
