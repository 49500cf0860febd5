# Copyright 2026 The hf-ttt authors. Licensed under the Apache License, Version 2.0.
"""Folders that are written whole or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise a `ValueError` if a model may not be written to a folder.

    Args:
        folder: may be absent or empty.
        overwrite: whether it may also hold a model, which is to be replaced.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"output={str(folder)!r} is a file; expected a folder")
    if any(folder.iterdir()):
        if not overwrite:
            raise ValueError(f"output={str(folder)!r} is not empty; choose another folder, or set --overwrite")
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"output={str(folder)!r} has no config.json, so it is no model that --overwrite may replace; choose "
                "another folder"
            )


@contextlib.contextmanager
def new_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when the block ends, and disappears if it raises.

    Args:
        folder: what becomes of it; absent, empty, or with `overwrite` a model.
        overwrite: whether a model is replaced.

    Raises:
        ValueError: if the folder holds something that must not be replaced.
    """
    folder = folder.expanduser().resolve()
    check_free(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        yield new
        check_free(folder, overwrite)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
