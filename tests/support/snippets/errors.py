"""Catch errors: all have one base class, a message, and its parts as attributes."""

import ckptconv

try:
    ckptconv.convert("ddp.pt", "ddp.pt", map_location="cpu")
except ckptconv.RefusedError as error:
    print(f"{error.what}: {error.hint}")
try:
    ckptconv.convert("nowhere.pt", "a.pt")
except ckptconv.InputError as error:
    print(error.where, error)
try:
    ckptconv.strip_prefix({"a": 1}, "module.")
except ckptconv.CkptconvError as error:
    print(error.got)
