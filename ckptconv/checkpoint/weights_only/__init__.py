"""A static check of ``torch.load(path, map_location="cpu", weights_only=True)``, without torch.

The check follows the calls in a graph one by one, as torch's safe unpickler would make them. Start with ``unpickler``.
``docs/loads.md`` says what is proved and what is not.
"""
