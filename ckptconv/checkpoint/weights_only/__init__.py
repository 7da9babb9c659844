"""A prediction of ``torch.load(path, map_location="cpu", weights_only=True)``, without torch.

The calls in a graph are checked one by one, in the order in which torch's safe unpickler would execute them. Start with
``unpickler``. ``docs/loads.md`` describes what is proved and what is not.
"""
