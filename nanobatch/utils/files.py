"""Files that users name: regular ones only, so that no read waits for ever.

Always holds: a name that no file can have, a FIFO, a device, a socket or a directory is refused
before it is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def check_file(file: Path) -> None:
    """Raise unless there is a regular file of that name (or a link to one).

    Raises:
        FileNotFoundError: there is nothing of that name, or no file can have it.
        ValueError: it is something else than a file.
    """
    if not os.path.exists(file):  # Path.exists raises for a name that is too long
        raise FileNotFoundError(f"{file}: no such file")
    if not os.path.isfile(file):
        raise ValueError(f"{file}: not a regular file")


def read_json(file: Path) -> dict:
    """The object that a JSON file holds.

    Raises:
        FileNotFoundError, ValueError: as check_file; or it holds none. They name the file.
    """
    check_file(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return content


def check_files_in(directory: Path, patterns: Sequence[str]) -> None:
    """Raise ValueError if an entry of one of these names is neither a file nor a directory."""
    for pattern in patterns:
        for entry in directory.glob(pattern):
            if os.path.exists(entry) and not os.path.isdir(entry):
                check_file(entry)
