"""The meaning of a pickle's graph for torch: storages, tensors, state dicts, optimizers, modules, and safe objects.

May import ``byteranges`` and the packages below it. Start with ``model`` (the data), then ``index`` (graph to tensors).
"""
