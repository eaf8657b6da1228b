"""Files that are whole or not there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "wb") -> Iterator[IO]:
    """Write a file under another name, which it leaves for its own when it is finished."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, mode) as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp's files are the owner's alone.
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
