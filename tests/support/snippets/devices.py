"""Map devices to other devices."""

import ckptconv

ckptconv.convert("two_gpus.pt", "a.pt", map_location={"cuda:0": "cuda:1", "any": "cpu"})
ckptconv.convert("two_gpus.pt", "b.pt", map_location=lambda tag: tag.replace("cuda", "xpu"))


def next_gpu(tag: str) -> str:
    family, _, index = tag.partition(":")
    return f"{family}:{int(index) + 1}" if index else tag


target: ckptconv.MapLocation = next_gpu
ckptconv.convert("two_gpus.pt", "c.pt", map_location=target)
