"""Which files make a corpus, in which order, and how they are joined."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Callable
from pathlib import Path

from swarm.errors import DataError

_FOLDERS_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# Written by the build or the distribution, with paths and flags of the machine in them.
_MODULES_LEFT_OUT = frozenset({"sitecustomize.py", "usercustomize.py"})
_PREFIXES_LEFT_OUT = ("config-", "_sysconfigdata")


def read_standard_library() -> bytearray:
    """The sources of the running Python's own standard library, without its tests.

    Raises:
        DataError: this Python has no sources, or one cannot be read.
    """
    content = read_folder(Path(sysconfig.get_paths()["stdlib"]), _is_library_part)
    if not content:
        raise DataError("this Python has no sources of its standard library: use text:PATH")
    return content


def read_text(path: str) -> bytearray:
    """The bytes of a file, or of all files in a folder that are not hidden.

    Raises:
        DataError: there is no such file or folder, or something in it cannot be read.
    """
    root = Path(path)
    mode = _mode(root)
    if stat.S_ISDIR(mode):
        return read_folder(root, _is_visible)
    if stat.S_ISREG(mode):
        return bytearray(_read(root))
    raise DataError(f"text path {path!r} is neither a file nor a folder: name one of them")


def read_folder(root: Path, wanted: Callable[[str, bool], bool]) -> bytearray:
    """All regular files under ``root`` that are not empty, joined by newlines.

    They are sorted by their posix paths relative to ``root``.

    ``wanted(name, is_folder)`` says whether a file or folder of that name belongs to it. Links
    to folders are not followed, for they may lead in a circle.

    Raises:
        DataError: a file or folder cannot be read.
    """
    paths = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if wanted(name, True)]
        paths += [Path(folder, name) for name in files if wanted(name, False)]
    content = bytearray()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        part = _read(path) if stat.S_ISREG(_mode(path)) else b""
        if part and content:
            content += b"\n"
        content += part
    return content


def _is_library_part(name: str, is_folder: bool) -> bool:
    if name.startswith(_PREFIXES_LEFT_OUT):
        return False
    if is_folder:
        return name not in _FOLDERS_LEFT_OUT
    return name.endswith(".py") and name not in _MODULES_LEFT_OUT


def _is_visible(name: str, is_folder: bool) -> bool:
    return not name.startswith(".")


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unreadable(path, error) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _refuse(error: OSError) -> None:
    raise _unreadable(error.filename, error) from error


def _unreadable(path: str | Path, error: OSError | ValueError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else error
    return DataError(f"data file {str(path)!r}: {reason}; name a path that can be read")
