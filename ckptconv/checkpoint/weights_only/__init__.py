"""A static check of ``torch.load(path, map_location="cpu", weights_only=True)``: what its unpickler would make of a
graph, call by call, without torch. ``unpickler`` is the entry; ``docs/loads.md`` says what is proved and what is not.
"""
