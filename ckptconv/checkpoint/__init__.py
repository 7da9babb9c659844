"""What a pickle's graph means to torch: storages, tensors, state dicts, optimizers, modules, and what is safe to load.

May import: ``byteranges`` and what stands below it. Start with ``model`` (the data), then ``index`` (graph to tensors).
"""
