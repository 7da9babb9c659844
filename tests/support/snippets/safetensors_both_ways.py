"""Convert a checkpoint to safetensors and back."""

import ckptconv

left = ckptconv.convert("training.pt", "weights.safetensors").left_behind
print([each.path for each in left])
ckptconv.convert("weights.safetensors", "weights.pt", map_location="cuda:1", add_prefix=["module."])
