"""Files, zips, pickles and folders that are not checkpoints: their kinds, and the next step for each."""
