"""The limits on input, each with its reason. :data:`LIMITS` has the values."""

from __future__ import annotations

from ckptconv.light_dataclass import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Limits:
    """The limits on input. Input above a limit raises :class:`~ckptconv.errors.LimitError`."""

    #: A checkpoint of 60,000 tensors has a pickle of 8 MB, a thirtieth of this. Long texts in it do not count.
    pickle_bytes: int = 256 * MIB
    #: 60,000 tensors take 1.9 million opcodes, so 600,000 fit. An opcode costs at most 300 bytes of memory, 6 GB in
    #: all.
    pickle_opcodes: int = 20_000_000
    #: Different classes and functions that one pickle names; Python, torch and numpy together have fewer.
    globals: int = 50_000
    #: Characters in the names of all globals. One text in a pickle can be the module of many globals. Python, torch and
    #: numpy have fewer characters.
    global_characters: int = 16 * MIB
    #: Characters in the name of one of them, which each of its calls needs several times. Those in the files that tests
    #: read have at most 56.
    global_name: int = 1_000
    #: Steps of work in one command (:mod:`ckptconv.work`), and more for each byte of its pickles and headers. A step is
    #: about half a microsecond or 30 bytes of memory. The real files that tests read take at most 62,000 steps, and at
    #: most 2 for a byte. A module of 3,000 layers takes 1.7 for a byte in ``inspect``, and 3.0 for ``--loadable``.
    work: int = 4_000_000
    work_each: int = 4
    #: A text or bytes object above this stays in the file, as a byte range.
    inline_bytes: int = 64 * KIB
    #: Bytes of a line of protocol 0, or of an integer. CPython refuses decimal integers of more than 4,300 digits.
    pickle_line: int = 16 * MIB
    #: pickle's writer fails near 1,000 levels (Python's recursion limit), so there are no deeper pickles.
    nesting: int = 1_000
    #: Characters in all paths. A key that the pickle contains once can be in the path of everything below it.
    path_characters: int = 16 * MIB
    #: Characters in all paths, in addition, for each opcode: a tensor takes thirty opcodes, and its path is rarely
    #: longer than a hundred characters.
    path_characters_each: int = 100
    #: Characters in all paths of a file without a pickle: the names in a safetensors header fit.
    path_characters_unpickled: int = 128 * MIB
    #: torch's tensors have at most 64 dimensions.
    rank: int = 64
    #: Elements, offsets, strides. torch counts bytes in 64 bits with a sign: below this, the product with the size of
    #: an element does not overflow.
    elements: int = 1 << 62
    #: Characters in a name that is matched with a user's regular expression: a quadratic one takes a million steps. The
    #: longest name in the real files that tests read has 60 characters. The same for the names of sizes in a
    #: ``config.json``.
    matched_name: int = 1_000
    #: Tensors that one rule of ``--regroup`` makes: 100 layers of 512 experts of three tensors are fewer. A tensor
    #: without elements can have any number of rows.
    regrouped: int = 200_000
    #: Bytes of a file of such rules, or of sizes for them.
    rules_bytes: int = MIB
    #: Characters of one rule. Each part of a split is made for each name that matches.
    rule_length: int = 10_000
    #: Names on the sides of rules that are read, times names of tensors: 90,000 names and 100 rules are fewer.
    rule_steps: int = 50_000_000
    #: Seconds of processor time for matching all names with a regular expression: 60,000 names take 0.1.
    match_seconds: int = 10
    #: Steps in which the parameters of an optimizer are compared with the weights: a model has some thousand of each.
    optimizer_steps: int = 2_000_000
    #: Nested calls that make one tensor (a parameter of a subclass of a view); torch writes three. They are read by
    #: recursion.
    nested_calls: int = 50
    #: Bytes of tensors that are read to find out whether torch loads a file: the sizes of nested tensors, 16 bytes for
    #: each component.
    values_read: int = 16 * MIB
    #: Bytes of tensors that torch copies while it loads them, for the same purpose. Most are not copied.
    values_copied: int = 256 * MIB
    #: Bytes of deflated storages, for the same purpose. Only small checkpoints are deflated.
    inflated_to_prove: int = 64 * MIB
    #: Levels of pickles inside byte strings inside pickles. One occurs, two are an attack.
    nested_pickles: int = 8
    #: Pickles inside one file. A model of a thousand layers can have one in each.
    pickles_inside: int = 10_000
    #: Concerns that are listed, and the same number of dangerous ones in addition. The others are counted.
    concerns: int = 1_000
    #: Opcodes of a pickle inside a byte string, whose graph is in memory at the same time: those of 30,000 tensors.
    nested_opcodes: int = 1_000_000
    #: Opcodes of a file of another format that begins like a pickle, and bytes of one of their lines. More do not occur
    #: by chance.
    second_reading_opcodes: int = 10_000
    second_reading_bytes: int = 16 * MIB
    #: A checkpoint has one member for each storage. 60,000 are many, and 600,000 fit into the limit of opcodes.
    zip_members: int = 1_000_000
    #: The zip format's own bound on a name.
    member_name: int = 64 * KIB
    #: Bytes of a record that contains one word: 'little', '3', '64'.
    note_bytes: int = 64
    #: A pickle of protocol 0 or 1 has no header, so a text that could be one is parsed. Most other texts are longer.
    unmarked_pickle_bytes: int = MIB
    #: Characters of a persistent id in protocol 0, a text in which a pattern finds key and device. torch's keys are
    #: addresses of at most twenty digits.
    id_text: int = 100
    #: Classes, attributes, listed names and devices in the code of a TorchScript archive. A model of 10,000
    #: layers has ten for each.
    script_words: int = 500_000
    #: Real pickles, and code, deflate 5 to 20 : 1. The format's bound is 1,032 : 1.
    pickle_inflate_ratio: int = 100
    #: Opcodes of all deflated pickles in one command, and bytes of them and of deflated JSON for which work is granted,
    #: in addition to one for each deflated byte. A deflated checkpoint of 260,000 tensors, whose pickle has 5.8 million
    #: deflated bytes, is read.
    inflated_bytes: int = 2 * MIB
    #: Bytes of all code of a TorchScript archive: a model of 10,000 layers has a few megabytes.
    script_bytes: int = 64 * MIB
    #: Bytes of the JSON of a torch.export program: one of 100,000 nodes has some 50 megabytes.
    program_bytes: int = 128 * MIB
    #: The bound of the safetensors library.
    safetensors_header: int = 100_000_000
    #: A tensor in a header takes 3 brackets and 8 quotation marks. More than a million tensors have are refused before
    #: the header is parsed.
    header_brackets: int = 3_000_000
    header_quotes: int = 10_000_000
    #: Commas in addition to those of the ranks that torch allows: in texts.
    header_commas: int = 5_000_000
    #: A number in a safetensors header: the library counts in 64 bits.
    header_number: int = 1 << 64
    #: The numbers in the names of shards have five digits.
    shards: int = 99_999
    #: Digits of a number in an index. A float has no more.
    index_digits: int = 300
    #: Missing items of lists: torch.distributed.checkpoint does not store empty dicts and lists. An index of 2^60 must
    #: not make a list of that length.
    list_holes: int = 10_000
    #: Keys, values and opcodes that set the fields of an object in the metadata of torch.distributed.checkpoint. No
    #: class there has more than eight fields.
    metadata_state: int = 32
    #: Nodes of the objects that are stored one by one in a folder of torch.distributed.checkpoint, in addition to the
    #: opcodes of their pickle. Objects rarely share more than the name of a class.
    shared_nodes: int = 100_000
    #: Processes of one run whose files are merged. The largest runs have some ten thousand, and save in other ways.
    ranks: int = 100_000
    #: Pieces of the flat tensors of DeepSpeed ZeRO that parameters are cut into: 10,000 parameters on 1,000 ranks.
    zero_cuts: int = 10_000_000
    #: Slices of one tensor that one process has: with tensor parallelism and FSDP, one for each of some tens of
    #: processes.
    strips: int = 10_000
    #: Steps, for each opcode of a rank's pickle, of finding which elements of its tensors the process has. A tensor
    #: that FSDP and tensor parallelism divide takes thirty, for fifty opcodes.
    spread_steps: int = 4
    #: Each chunk in that metadata takes more than twelve opcodes, a list of them at least one. A list that many tensors
    #: share must not be read for each of them.
    opcodes_of_a_chunk: int = 4
    #: A configuration next to a model, from which a dtype is read, has some thousands.
    config_bytes: int = MIB
    #: Names in a folder that are read to find out the kind of the folder.
    folder_names: int = 5_000
    #: Files in and below a remote folder: a listing of a hundred requests.
    far_files: int = 100_000
    #: Characters of the path of such a file: S3's own bound, in bytes.
    far_name: int = 1_024
    #: Bytes of JSON that are read to describe a file that is not a checkpoint. A configuration has some thousands.
    foreign_json: int = MIB
    #: The same for an index of shards: 90,000 tensors take nine million bytes.
    foreign_index: int = 16 * MIB
    #: Zeros that are counted at the start of an incomplete download, and members of a tar archive that are listed.
    foreign_zeros: int = 64 * MIB
    foreign_members: int = 100
    #: Findings about one checkpoint that ``verify`` lists. The others are counted.
    findings: int = 1_000
    #: Bytes of an undo journal. It contains a pickle twice, or a header, and the directory of a zip.
    undo_journal: int = 1024 * MIB
    #: Bytes of its header: a pickle of 256 MiB of which every second sector changes takes 8 MB, and 99,999 shards 4 MB.
    undo_header: int = 16 * MIB
    #: Bytes of the views of a storage in the output, and of an output in addition to its input; and the same as a
    #: multiple of the storage or input. A view can repeat its elements (stride 0), and views can overlap, until they
    #: fit on no disk. A cast makes at most eight bytes of one. The larger of the two limits counts.
    gathered_bytes: int = 1024 * MIB
    gathered_ratio: int = 16

    def paths(self, opcodes: int) -> int:
        """Return how many characters all paths may have in a pickle of `opcodes` opcodes, or without a pickle if it
        is 0.
        """
        return self.path_characters + self.path_characters_each * opcodes if opcodes else self.path_characters_unpickled

    def gathered(self, nbytes: int) -> int:
        """Return how many bytes the views of a storage of `nbytes` may have in the output."""
        return max(self.gathered_ratio * nbytes, self.gathered_bytes)

    def written(self, nbytes: int) -> int:
        """Return how many bytes an output may have whose input has `nbytes`."""
        return max(self.gathered_ratio * nbytes, nbytes + self.gathered_bytes)


LIMITS = Limits()


def lower(**bounds: int) -> None:
    """Make some of :data:`LIMITS` smaller until the process ends, for example for a browser, whose stack is small.

    Args:
        **bounds: New values by the names of limits.

    Raises:
        ValueError: There is no such limit, or the new value is larger than the old one or not positive.
    """
    for name, bound in bounds.items():
        if not 0 < bound <= getattr(LIMITS, name, 0):
            raise ValueError(f"{name}={bound} does not lower the limit")
        object.__setattr__(LIMITS, name, bound)  # modules have imported this object
