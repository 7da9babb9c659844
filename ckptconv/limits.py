"""The limits on input, each with its reason, in one frozen dataclass: :data:`LIMITS`."""

from __future__ import annotations

from ckptconv.light_dataclass import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Limits:
    """Bounds on input; what is above one of them raises :class:`~ckptconv.errors.LimitError`."""

    #: A checkpoint of 60,000 tensors has a pickle of 8 MB; this is thirty times that.
    #: Long texts inside it do not count.
    pickle_bytes: int = 256 * MIB
    #: 60,000 tensors take 1.9 million opcodes, so some 600,000 fit; one of ours costs at most 300 bytes, so this bounds
    #: memory at 6 GB.
    pickle_opcodes: int = 20_000_000
    #: Different classes and functions that one pickle names; Python, torch and numpy together have fewer.
    globals: int = 50_000
    #: Of the names of all these. What the pickle says once can be the module of each; Python, torch and numpy have
    #: fewer.
    global_characters: int = 16 * MIB
    #: A text or bytes object above this stays in the file, as a byte range.
    inline_bytes: int = 64 * KIB
    #: A line of protocol 0, or an integer. CPython itself refuses decimal integers of more than 4,300 digits.
    pickle_line: int = 16 * MIB
    #: pickle's own writer gives up near 1,000 (Python's recursion limit), so nobody can have written more.
    nesting: int = 1_000
    #: Of all paths together. A key that the pickle names once can stand in the path of everything below it.
    path_characters: int = 16 * MIB
    #: And for each opcode: a tensor takes some thirty, and its path is seldom longer than a hundred.
    path_characters_each: int = 100
    #: Of all paths where there is no pickle: the names in a safetensors header fit.
    path_characters_unpickled: int = 128 * MIB
    #: torch's tensors have at most 64 dimensions.
    rank: int = 64
    #: Elements, offsets, strides: torch counts in 64 bits with a sign, and in bytes; below this no product of one of
    #: them with an item's size overflows there.
    elements: int = 1 << 62
    #: Of a name that a user's regular expression is matched with: a quadratic one looks at a million places. The
    #: longest name in the real files that tests read has 60 characters.
    matched_name: int = 1_000
    #: Of processor time, for matching all names with one regular expression: 60,000 take a tenth of one.
    match_seconds: int = 10
    #: Calls around each other that make one tensor (a parameter of a subclass of a view); torch writes three. They are
    #: read by recursion.
    nested_calls: int = 50
    #: What is read of tensors to tell whether torch loads a file: the sizes of nested tensors, 16 bytes for each part.
    values_read: int = 16 * MIB
    #: Of tensors that torch copies while it loads them, for the same; most it takes as they stand in the file.
    values_copied: int = 256 * MIB
    #: Deflated storages, for the same: nobody's checkpoint is deflated but small ones.
    inflated_to_prove: int = 64 * MIB
    #: Pickles inside byte strings inside pickles; one happens, two are an attack.
    nested_pickles: int = 8
    #: Pickles inside one file; a model of a thousand layers can have a state of its own kind in each.
    pickles_inside: int = 10_000
    #: Concerns that are listed, and as many dangerous ones beyond; the rest is counted. More names nobody reads.
    concerns: int = 1_000
    #: Of one pickle inside a byte string, which is in memory as a graph meanwhile: those of 30,000 tensors.
    nested_opcodes: int = 1_000_000
    #: Of what starts as a pickle by chance and is another format: nobody writes that many opcodes by accident, nor that
    #: many bytes in one of their lines.
    second_reading_opcodes: int = 10_000
    second_reading_bytes: int = 16 * MIB
    #: A checkpoint has one member for each storage; 60,000 are a lot, and the opcodes end at 600,000.
    zip_members: int = 1_000_000
    #: The zip format's own bound on a name.
    member_name: int = 64 * KIB
    #: The records in which one word stands: 'little', '3', '64'.
    note_bytes: int = 64
    #: A pickle of protocol 0 or 1 has no mark, so a text that could be one is tried;
    #: those that are none are mostly longer.
    unmarked_pickle_bytes: int = MIB
    #: What protocol 0 makes of a persistent id is a text, in which key and device are found by a pattern. torch's keys
    #: are addresses of at most twenty digits.
    id_text: int = 100
    #: Of the code of a TorchScript archive: lines that say classes, attributes, listed names, devices. A model of
    #: 10,000 layers has some ten of them for each.
    script_words: int = 500_000
    #: Real pickles, and code, deflate 5 to 20 : 1; deflate itself ends at 1,032 : 1.
    pickle_inflate_ratio: int = 100
    #: All code of a TorchScript archive: a model of 10,000 layers has a few megabytes.
    script_bytes: int = 64 * MIB
    #: The safetensors library's own bound; no reader takes more.
    safetensors_header: int = 100_000_000
    #: A tensor in a header takes 3 brackets and 8 quotation marks; more of either than a million tensors have is
    #: refused before anything is made of them.
    header_brackets: int = 3_000_000
    header_quotes: int = 10_000_000
    #: Commas beyond those of the ranks that torch allows: in texts.
    header_commas: int = 5_000_000
    #: A number in a safetensors header: the library counts in 64 bits.
    header_number: int = 1 << 64
    #: The numbers in the names of shards have five digits.
    shards: int = 99_999
    #: Of a number in an index; a float ends there.
    index_digits: int = 300
    #: Places in lists, where empty dicts and lists stood, which torch.distributed.checkpoint does not store: an index
    #: of 2^60 must not make a list of that length.
    list_holes: int = 10_000
    #: What sets one field of an object in the metadata of torch.distributed.checkpoint: keys, values and opcodes; no
    #: class there has more than eight fields.
    metadata_state: int = 32
    #: Processes of one run whose files are merged. The largest runs have some ten thousands, and save in other ways.
    ranks: int = 100_000
    #: Pieces of one tensor that one process has; where tensor parallelism meets FSDP it has one for each of at most
    #: some tens of processes.
    strips: int = 10_000
    #: For each opcode of a rank's pickle: steps of finding which elements of its tensors the process has. A tensor that
    #: FSDP and tensor parallelism cut takes some thirty, for fifty opcodes.
    spread_steps: int = 4
    #: Each chunk in that metadata takes more than three times as many opcodes, a list of them at least one; one list
    #: that many tensors share must not be read for each of them.
    opcodes_of_a_chunk: int = 4
    #: A configuration beside a model, of which a dtype is taken, has some thousands.
    config_bytes: int = MIB
    #: Names in a folder that are looked at, where it is said what the folder is.
    folder_names: int = 5_000
    #: Files in a far folder and below it: a listing of a hundred requests.
    far_files: int = 100_000
    #: What is read of a file that is no checkpoint, to say what it is: of JSON, a
    #: configuration has some thousands of bytes;
    foreign_json: int = MIB
    #: of an index of shards, 90,000 tensors have nine million bytes;
    foreign_index: int = 16 * MIB
    #: of zeros, which are counted where a download was only begun; and so many members of a tar archive.
    foreign_zeros: int = 64 * MIB
    foreign_members: int = 100
    #: That verify names of one checkpoint; the rest is counted. More lines nobody reads.
    findings: int = 1_000
    #: An undo journal holds a pickle twice, or a header, and a zip's directory.
    undo_journal: int = 1024 * MIB
    #: What is written out of a storage, and a whole output of its input: a view can repeat its elements (stride 0), and
    #: views can overlap, until no disk holds them. A cast makes at most eight bytes of one. The larger of the two
    #: counts.
    gathered_bytes: int = 1024 * MIB
    gathered_ratio: int = 16

    def paths(self, opcodes: int) -> int:
        """The most characters that the paths in a pickle of so many `opcodes` may have; 0: in what is no pickle."""
        return self.path_characters + self.path_characters_each * opcodes if opcodes else self.path_characters_unpickled

    def gathered(self, nbytes: int) -> int:
        """The most bytes that views of a storage of `nbytes` may have, written out."""
        return max(self.gathered_ratio * nbytes, self.gathered_bytes)

    def written(self, nbytes: int) -> int:
        """The most bytes that an output made of `nbytes` may have."""
        return max(self.gathered_ratio * nbytes, nbytes + self.gathered_bytes)


LIMITS = Limits()


def lower(**bounds: int) -> None:
    """Make some of :data:`LIMITS` smaller, for this process and for good: a browser's stack ends below 1,000 levels.

    Args:
        **bounds: Names of limits, with what they are from now on.

    Raises:
        ValueError: There is no such limit, or it would grow.
    """
    for name, bound in bounds.items():
        if not 0 < bound <= getattr(LIMITS, name, 0):
            raise ValueError(f"{name}={bound} lowers no limit")
        object.__setattr__(LIMITS, name, bound)  # whoever has imported it has this one
