"""Recognition of files, zips, pickles and folders that are not checkpoints, and advice for each kind."""
