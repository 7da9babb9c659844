"""Give a file or folder the owner, group, permissions and attributes of the one that it replaces."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ckptconv.errors import RefusedError

_ACCESS_LIST = "system.posix_acl_access"
#: Access control lists, attributes of users, and SELinux's label. Other attributes belong to the system: of Lustre's,
#: for example, each file has its own.
_KEPT = ("system.", "user.", "security.selinux")


def take_over(new: int | Path, old: Path) -> None:
    """Give `new`, an open file or a folder, the owner, group, permissions and extended attributes of `old`.

    If the system does not let us keep the group, the group gets only the permissions that everybody has. An access
    control list, which says what the group may do, is not kept then.

    Raises:
        RefusedError: An attribute, such as an access control list, cannot be kept. `new` is not more open than `old`.
        OSError: A system call fails.
    """
    info = os.stat(old)
    mode = _give_away(new, info)
    before, after = _attributes(old), _attributes(new)
    if _ACCESS_LIST in before and os.stat(new).st_gid != info.st_gid:
        raise _not_kept(_ACCESS_LIST, old, PermissionError(errno.EPERM, "its group cannot be kept"))
    for name in before.keys() | after.keys():
        try:
            if name not in before:  # inherited from the folder
                os.removexattr(new, name)
            elif before[name] != after.get(name):
                os.setxattr(new, name, before[name])
        except OSError as error:
            raise _not_kept(name, old, error) from error
    os.chmod(new, mode)


def _give_away(new: int | Path, info: os.stat_result) -> int:
    """Give `new` the owner and group in `info`, and return the permissions that it may have."""
    mine, mode = os.stat(new), stat.S_IMODE(info.st_mode)
    if (mine.st_uid, mine.st_gid) == (info.st_uid, info.st_gid):
        return mode
    for owner in (info.st_uid, -1):
        try:
            os.chown(new, owner, info.st_gid)
        except OSError:
            mode &= ~stat.S_ISUID
        else:
            return mode
    others = mode & stat.S_IRWXO
    return mode & ~(stat.S_ISGID | stat.S_IRWXG) | mode & others << 3


def _attributes(path: int | Path) -> dict[str, bytes]:
    """Return the extended attributes of `path` that its successor keeps."""
    found: dict[str, bytes] = {}
    try:
        names = os.listxattr(path) if hasattr(os, "listxattr") else []
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return found
        raise
    for name in names:
        try:
            if name.startswith(_KEPT):
                found[name] = os.getxattr(path, name)
        except OSError as error:
            raise _not_kept(name, path, error) from error
    return found


def _not_kept(name: str, path: int | Path, error: OSError) -> RefusedError:
    what = "access control list" if "acl" in name else f"attribute {name}"
    return RefusedError(
        f"the {what} of the old output cannot be kept: {error.strerror}",
        where=path,
        hint="convert to another name, or delete the old output first",
    )
