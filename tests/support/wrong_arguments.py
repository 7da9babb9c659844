"""Calls of public functions with arguments of wrong types. They are never executed. mypy reports each ``type: ignore``
comment that ignores no error.
"""

import ckptconv

ckptconv.convert("a.pt", "b.pt", map_location=3)  # type: ignore[arg-type]
ckptconv.load("a.pt", state_dict="model")  # type: ignore[arg-type]
x: str = ckptconv.inspect("a.pt").nbytes  # type: ignore[assignment]
ckptconv.open("a.pt").load(3)  # type: ignore[arg-type]
ckptconv.save([], "a.pt", format="zip")  # type: ignore[arg-type]
y: list[int] = ckptconv.strip_prefix({"a": 1}, "module.")  # type: ignore[assignment]
ckptconv.devices(1, 2)  # type: ignore[call-arg]
ckptconv.diff("a.pt", "b.pt", dtype="bf16")  # type: ignore[call-arg]
ckptconv.jobs_in("a", "b", force="yes")  # type: ignore[arg-type]
