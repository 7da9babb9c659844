"""Files, zips, pickles and folders that are no checkpoint: what each of them is, and what to type next."""
