"""Torch's view of a pickle's graph: storages, tensors, state dicts, optimizers, modules, and safe objects.

May import ``byteranges`` and the packages below it. Start with ``model`` (the data), then ``index`` (graph to tensors).
"""
