"""A checkpoint in several files with an index, as the Hub's tools write it. Start with ``reading``."""
