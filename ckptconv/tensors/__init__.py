"""Where numbers change and real tensors are handed out: the only package that imports torch, and only its modules do."""
