"""The most that a file may ask of us, each number with its reason. One frozen dataclass, one instance: :data:`LIMITS`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Limits:
    """Bounds on input; what is above one of them raises :class:`~ckptconv.errors.LimitError`."""

    #: A checkpoint of 60,000 tensors has a pickle of 8 MB; this is thirty times that. Long texts inside it do not count.
    pickle_bytes: int = 256 * MIB
    #: 60,000 tensors take 1.9 million opcodes; one of ours costs at most 300 bytes, so this bounds memory at 6 GB.
    pickle_opcodes: int = 20_000_000
    #: A text or bytes object above this stays in the file, as a byte range.
    inline_bytes: int = 64 * KIB
    #: A line of protocol 0, or an integer. CPython itself refuses decimal integers of more than 4,300 digits.
    pickle_line: int = 16 * MIB
    #: pickle's own writer gives up near 1,000 (Python's recursion limit), so nobody can have written more.
    nesting: int = 1_000
    #: Of all paths together. A key that the pickle names once can stand in the path of everything below it. Names in a safetensors header fit.
    path_characters: int = 128 * MIB
    #: And for each opcode: a tensor takes some thirty, and its path is seldom longer than a hundred.
    path_characters_each: int = 100
    #: torch's tensors have at most 64 dimensions.
    rank: int = 64
    #: A checkpoint has one member for each storage; 60,000 are a lot.
    zip_members: int = 1_000_000
    #: The zip format's own bound on a name.
    member_name: int = 64 * KIB
    #: Of the code of a TorchScript archive: lines that say classes, attributes, listed names, devices. A model of 10,000 layers has some ten of them for each.
    script_words: int = 500_000
    #: Real pickles, and code, deflate 5 to 20 : 1; deflate itself ends at 1,032 : 1.
    pickle_inflate_ratio: int = 100
    #: All code of a TorchScript archive: a model of 10,000 layers has a few megabytes.
    script_bytes: int = 64 * MIB
    #: The safetensors library's own bound; no reader takes more.
    safetensors_header: int = 100_000_000
    #: A tensor in a header takes 3 brackets and 8 quotation marks; more of either than a million tensors have is refused before anything is made of them.
    header_brackets: int = 3_000_000
    header_quotes: int = 10_000_000
    #: Commas beyond those of the ranks that torch allows: in texts.
    header_commas: int = 5_000_000
    #: What is written out of a storage: a view can repeat its elements (stride 0) until no disk holds them. The larger of the two counts.
    gathered_bytes: int = 1024 * MIB
    gathered_ratio: int = 16

    def gathered(self, nbytes: int) -> int:
        """The most bytes that views of a storage of NBYTES may have, written out."""
        return max(self.gathered_ratio * nbytes, self.gathered_bytes)


LIMITS = Limits()
