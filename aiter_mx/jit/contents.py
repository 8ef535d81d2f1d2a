"""Lists and clears what the cache folder holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aiter_mx.errors import CacheError
from aiter_mx.jit.cache import NAME, forget_unshared, read, sweep
from aiter_mx.jit.folder import checked_dir, manifests, noted, notes_aside, read_regular


@dataclass(frozen=True)
class Entry:
    """An artifact in the cache, as a listing shows it.

    Attributes:
        kind, key: what it was stored under.
        path: the file.
        size_bytes: its length.
        built_at: when, in seconds since the epoch.
        describe: what it is, for people.
        intact: whether its contents are what was built.
    """

    kind: str
    key: str
    path: Path
    size_bytes: int
    built_at: float
    describe: str
    intact: bool


def entries() -> list[Entry]:
    """Every artifact in the cache, by kind and key."""
    root = checked_dir()
    found = []
    for path, match in _artifacts(root, noted(manifests(root))) if root else ():
        try:
            status = path.lstat()
        except OSError:
            continue  # cleared meanwhile
        try:
            about = json.loads(read_regular(path.with_suffix(".about")) or b"")
            describe = str(about["describe"])
        except (ValueError, KeyError, TypeError):
            describe = ""
        found.append(
            Entry(
                kind=path.parent.name,
                key=match["key"],
                path=path,
                size_bytes=status.st_size,
                built_at=status.st_mtime,
                describe=describe,
                intact=read(path) is not None,
            )
        )
    return found


def clear() -> int:
    """Delete every artifact and return how many there were.

    Nothing is touched that the folder's manifest does not name, whatever folder it is.
    """
    root = checked_dir()
    if root is None:
        return 0
    try:
        aside = notes_aside(root)
        every = noted(aside)
        artifacts = [path for path, _ in _artifacts(root, every)]
        doomed = [path for each in artifacts for path in (each, each.with_suffix(".about"))]
        for named in every:
            lock = root / "locks" / f"{named['kind']}-{named['key']}.lock"
            doomed += [lock, lock.with_suffix(".holder")]
        for path in (*doomed, *aside):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"the cache folder {root} cannot be cleared: {error}") from error
    sweep(root / "tmp")
    forget_unshared()
    return len(artifacts)


def _artifacts(root: Path, every: Iterable[re.Match[str]]) -> Iterator[tuple[Path, re.Match[str]]]:
    """The files of what manifests name, by kind and key."""
    keys = {(named["kind"], named["key"], named["suffix"]) for named in every}
    for kind in sorted({kind for kind, *_ in keys if not (root / kind).is_symlink()}):
        for path in sorted((root / kind).glob("*")):
            match = NAME.fullmatch(path.name)
            if match and (kind, match["key"], match["suffix"]) in keys:
                yield path, match
