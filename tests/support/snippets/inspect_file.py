"""Inspect the contents of a file."""

import ckptconv

summary = ckptconv.inspect("training.pt")
nbytes: int = summary.nbytes
for device, share in summary.devices.items():
    print(device, share.tensors, share.nbytes)
for finding in summary.findings:
    print(finding.text, finding.command or "")
largest = max(summary.tensors, key=lambda tensor: tensor.nbytes)
print(largest.path, largest.shape)
