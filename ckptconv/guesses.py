"""The declaration of options, and words that users type instead of the names of options and keywords."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptconv.light_dataclass import dataclass


@dataclass(frozen=True)
class Flag:
    """The declaration of an option. It occurs as ``Annotated[type, Flag(...)]`` at a key of a TypedDict.

    The command line creates an option from it. Functions get a keyword and an entry in their docstring from it.

    Attributes:
        help: The text of ``--help``.
        doc: The text of the docstring. If it is empty, the docstring has the same text as ``--help``.
        metavar: The name of the value in ``--help``.
        short: The short flag, such as ``-f``.
    """

    help: str
    doc: str = ""
    metavar: str | None = None
    short: str = ""


DOWNLOAD = Flag(
    "If the server of a URL does not support range requests, download the whole file first.",
    "If the server of a URL does not support range requests, download the whole file first. The download is deleted"
    " after it is read.",
)

#: Keywords, their values, and the guesses that stand for them. A value None or {} is replaced by the value that the
#: user gave. If several keywords have the same guess, the first that the command or function has is used.
OPTIONS: tuple[tuple[str, str | bool | None, str], ...] = (
    ("map_location", None, "device devices target to-device dev d t"),
    ("map_location", "cpu", "cpu to-cpu no-cuda no-gpu"),
    ("map_location", "cuda", "gpu cuda to-cuda to-gpu"),
    ("map_location", "mps", "mps to-mps mac"),
    ("strip_prefix", None, "strip remove-prefix no-prefix drop-prefix prefix strip-module remove-module no-module"),
    ("dtype", None, "precision type cast bits torch-dtype"),
    ("dtype", "fp16", "half fp16 float16"),
    ("dtype", "bf16", "bf16 bfloat16"),
    ("dtype", "fp32", "float fp32 float32 full"),
    ("dtype", "float8_e4m3fn", "fp8 float8"),
    ("dtype", "{}=fp32", "keep-fp32 keep-float32 keep-in-fp32 skip-dtype"),
    ("format", None, "out-format output-format to-format out-type save-format"),
    ("format", "pt", "pth bin torch pytorch zip"),
    ("format", "pickle", "pkl pickled"),
    ("format", "safetensors", "safetensors safe to-safetensors st hf hub safe-serialization"),
    ("format", "legacy", "legacy old-format"),
    ("max_shard_size", None, "shard-size shard shards num-shards split"),
    ("select", None, "key subkey root extract part"),
    ("select", "ema", "ema ema-only only-ema keep-ema"),
    ("include", None, "only keep filter grep"),
    ("exclude", None, "ignore without skip"),
    ("drop", None, "remove delete del omit drop-key"),
    ("drop", "optimizer", "drop-optimizer no-optimizer remove-optimizer strip-optimizer without-optimizer"),
    ("state_dict", True, "weights-only model-only weights"),
    ("unwrap", True, "unwrap-ddp ddp uncompile no-compile"),
    ("rename", None, "replace-prefix rename-prefix rename-key replace-key sub"),
    ("compact", True, "shrink compress"),
    ("force", True, "overwrite yes y clobber replace"),
    ("jobs", None, "workers num-workers threads n-jobs nproc parallel"),
    ("dry_run", True, "plan noop simulate"),
    ("allow_unsafe", True, "unsafe trust"),
    ("quiet", True, "silent s"),
    ("all", True, "verbose v full a"),
    ("rtol", None, "tolerance tol eps"),
    ("names_only", True, "keys keys-only"),
    ("values", True, "stats statistics"),
    ("fail_on", "nan", "nan nans check-nan isnan has-nan"),
    ("expect_sha256", None, "sha256 sha hash checksum"),
)
#: Words that other programs use for an input path (first, 0) or an output path (last, -1).
PATHS = {
    guess: place
    for place, guesses in (
        (0, "src source input in infile in-file file path ckpt checkpoint"),
        (-1, "o out output outfile out-file dst dest destination to-file save"),
    )
    for guess in guesses.split()
}
#: Values that are used if the user gave none, or gave a number, as in --shards 4.
USUAL_VALUES = {"strip_prefix": "module.", "max_shard_size": "5GB"}
#: Options of other programs for things that are always done here.
ALWAYS = ("recursive", "r", "backup", "tensors", "list-tensors", "shapes", "params", "q", "quiet", "silent", "s")
#: The same for keywords only: names of options of the command line, and keywords of torch.
_KEYWORDS = (
    ("map_location", None, "to map maps"),
    ("path", None, "f filename"),
    ("obj", None, "model module object data"),
)
#: Keywords that are paths.
PLACES = ("src", "dst", "a", "b", "path", "folder")
_UNNEEDED = {
    "weights_only": "it is always as with weights_only=True",
    "mmap": "files are never read whole",
    "pickle_module": "nothing in a file is ever run",
}


def normal(guess: str) -> str:
    """Return `guess`, an option or a keyword, in lower case and with dashes instead of underscores."""
    return guess.lower().replace("_", "-")


def unneeded(guess: str, known: Sequence[str]) -> str | None:
    """Return the reason why a function with the keywords `known` does not need torch's keyword `guess`.

    Return None if `guess` has no such reason, or the function writes a file.
    """
    return None if "dst" in known else _UNNEEDED.get(guess)


def close_matches(word: str, known: Iterable[str], *, n: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` words of `known` that are similar to `word`, as ``difflib.get_close_matches`` does."""
    from difflib import get_close_matches

    return get_close_matches(word, [*known], n, cutoff)


def keyword_for(guess: str, value: object, known: Sequence[str]) -> tuple[str, object] | None:
    """Return the keyword of `known` that was probably intended by `guess`, and its value.

    The value in the result is None if it is not known. Return None if no keyword is similar.
    """
    word = normal(guess)
    for keyword, fixed, guesses in (*_KEYWORDS, *OPTIONS):
        if word in guesses.split() and keyword in known:
            if fixed is None:
                usual = USUAL_VALUES.get(keyword, None if isinstance(value, bool) else value)
                return keyword, usual if isinstance(value, int) else value
            if isinstance(fixed, str) and "{}" in fixed:
                return keyword, fixed.format(value)
            return keyword, fixed if value is not False else False if fixed is True else None
    places = [each for each in PLACES if each in known]
    if word in PATHS and places and (PATHS[word] == 0 or len(places) > 1 or "obj" in known):
        return places[PATHS[word]], value
    near = close_matches(guess, known, n=1, cutoff=0.7)
    return (near[0], value) if near else None
