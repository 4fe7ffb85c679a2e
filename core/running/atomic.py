# SPDX-License-Identifier: Apache-2.0
"""Replace a file so that a kill at any moment leaves a complete file, old or new.

The new contents are written to a temporary file, `.<name>.tmp-<pid>`, which is synced
and then renamed. A killed process leaves its temporary file; `sweep` removes it.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path


def write_atomically(
    path: Path,
    data: bytes | Iterable[bytes],
    check: Callable[[bytes], object] | None = None,
) -> None:
    """Write a file, or replace it.

    Args:
      data: the contents, or their parts, which may come from the old file.
      check: called with the contents of the temporary file, read back. If it raises,
        the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w+b") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            if check is not None:
                file.seek(0)
                check(file.read())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that new names in it survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot sync folders. They sync renames themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder.

    Call this only if no other process can be writing to the folder.
    """
    for path in folder.glob(".*tmp-*"):
        with contextlib.suppress(OSError):
            path.unlink()
