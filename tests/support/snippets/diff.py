"""Compare two files: find the tensors that fine-tuning changed, and test whether files are the same."""

import ckptconv

found = ckptconv.diff("ddp.pt", "ddp.pt", strip_prefix=["module."], names_only=True)
print(found.same, [missing.path for missing in found.only_in_a])
for tensor in ckptconv.diff("two_gpus.pt", "ddp.pt", rtol=1e-5).differing:
    if tensor.values is not None:
        print(tensor.path, tensor.dtype, tensor.values.differing, tensor.values.largest)
