"""Folders that are made once and kept: there whole or not at all, whoever else makes the same one meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def make_whole(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a draft beside `folder`, then give it its name. A folder with a config.json is a whole one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        fill(draft)
        try:
            os.rename(draft, folder)
        except OSError:  # another process was faster, and its copy is as good
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
