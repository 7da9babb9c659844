"""Issues with storages: bytes that no tensor uses, and tensors that share memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ckptconv.byteranges.spans import Inflate
from ckptconv.checkpoint.model import Checkpoint
from ckptconv.checkpoint.tensor_bytes import extent
from ckptconv.checkpoint.tensor_info import Storage, TensorInfo
from ckptconv.dtypes import get_dtype
from ckptconv.errors import size
from ckptconv.formats.safetensors_header import METADATA, is_text
from ckptconv.formats.writers import writer_for
from ckptconv.inspection.diagnosis.findings import Fix, Issue, Scope, first_few
from ckptconv.limits import LIMITS

_NOTABLE = 1_000_000  # unused bytes; what is less is not worth a line


def unused_bytes(scope: Scope) -> Iterator[Issue]:
    """Storages that are far bigger than what the tensors in them show."""
    if not any(info.storage and info.nbytes < info.storage.nbytes for info in scope.checkpoint.tensors.values()):
        return
    users = Counter(each.storage for each in scope.checkpoint.references)
    views: dict[Storage, list[TensorInfo]] = {}
    for info in scope.checkpoint.tensor_nodes.values():
        if info.storage is not None:
            views.setdefault(info.storage, []).append(info)
    unused = {
        storage: storage.nbytes - _covered(infos)
        for storage, infos in views.items()
        if users[storage] <= len(infos)
        and all(info.nbytes < storage.nbytes and get_dtype(info.dtype).packed == 1 for info in infos)
    }
    unused = {storage: nbytes for storage, nbytes in unused.items() if nbytes > 0}
    total = sum(storage.nbytes for storage in scope.checkpoint.storages.values())
    lost = sum(unused.values())
    if lost <= _NOTABLE or 2 * lost <= total:
        return
    first = views[max(unused, key=lambda storage: unused[storage])][0]
    larger = f"({first.path} is {size(first.nbytes)} of a larger storage)"
    text = f"{size(lost)} of {size(total)} stored are in no tensor {larger}"
    deflated = any(isinstance(storage.data, Inflate) for storage in unused)
    yield Issue("views", text, None if deflated else Fix("-compact", compact=True))


_TO_SAFETENSORS = Fix("-weights", format=writer_for(objects=False).word)


def _covered(infos: list[TensorInfo]) -> int:
    """How many bytes of a storage `infos` reach over."""
    covered = end = 0
    for start, stop in sorted(map(extent, infos)):
        covered += max(stop - max(start, end), 0)
        end = max(end, stop)
    return covered


def shared(scope: Scope) -> Iterator[Issue]:
    """Tensors of the state dict that share memory, which the safetensors library refuses to save."""
    if scope.checkpoint.index.is_unshared:
        return
    by_storage: dict[Storage, list[tuple[str, TensorInfo]]] = {}
    found = _for_safetensors(scope.checkpoint)
    for name, info in found.items():
        if info.storage is not None and info.nbytes:
            by_storage.setdefault(info.storage, []).append((name, info))
    pairs = []
    for views in by_storage.values():
        reach, whose = -1, ""
        for (start, stop), name in sorted((extent(info), name) for name, info in views) if len(views) > 1 else []:
            if start < reach:
                pairs.append(f"{whose} and {name}")
            if stop > reach:
                reach, whose = stop, name
    if pairs:
        text = (
            f"tensors of the state dict share memory ({first_few(pairs)}): safetensors' save_file refuses that, a"
            " conversion takes it"
        )
        yield Issue("ties", text, _TO_SAFETENSORS)


def _for_safetensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """The tensors of the state dict that a conversion would take, if safetensors can hold each; else none."""
    main = checkpoint.detected.main()
    found: dict[str, TensorInfo] = {}
    for key, value in main[0].items() if len(main) == 1 else ():
        info = checkpoint.tensor_nodes.get(id(value))
        if info is None:
            continue
        if not isinstance(key, str) or not is_text(key) or key == METADATA or key in found or not _fits(info):
            return {}
        found[key] = info
    return found


def _fits(info: TensorInfo) -> bool:
    """Whether safetensors can hold `info`; not everything that it can, but nothing that it cannot."""
    if info.kind != "strided" or info.storage is None or info.conj or info.neg:
        return False
    held = get_dtype(info.dtype).word is not None and (info.shape != () or info.dtype != "float4_e2m1fn_x2")
    return held and (info.contiguous or info.nbytes <= LIMITS.gathered_bytes)
