"""Writes which shipped tables are proven as they stand, for dispatch to trust."""

from __future__ import annotations

import json
import os
from pathlib import Path

from aiter_mx.dispatch.tables import DIGESTS, digest_of, shipped_digests
from aiter_mx.paths import configs_dir


def is_unrecorded(path: Path) -> bool:
    """Whether a shipped table is not the one that was proven last."""
    name = _shipped_name(path)
    return name is not None and shipped_digests().get(name) != digest_of(path)


def record_digest(path: Path) -> None:
    """Tell dispatch that a shipped table is proven as it stands; nothing for a file elsewhere."""
    name = _shipped_name(path)
    if name is None:
        return
    folder = configs_dir()
    known = {**shipped_digests(), name: digest_of(path)}
    here = {name: digest for name, digest in known.items() if (folder / name).is_file()}
    draft = folder / f".{DIGESTS}.{os.getpid()}"
    draft.write_text(json.dumps(here, indent=2, sort_keys=True) + "\n")
    draft.replace(folder / DIGESTS)


def _shipped_name(path: Path) -> str | None:
    """What ``digests.json`` calls a table; None where it is no shipped one."""
    whole, folder = path.resolve(), configs_dir()
    return whole.relative_to(folder).as_posix() if whole.is_relative_to(folder) else None
