"""Words of 32 bits through which a launch's workgroups meet: zero when it begins, and when it ends.

Launches that may run side by side must not share them. Those of one stream follow each other, so
each stream has some of its own. A captured launch may be replayed beside any other, so it keeps its
own for ever: as much as its results or more, out of memory that was zeroed before the capture.
"""

from __future__ import annotations

import torch

from aiter_mx.forks import Lock

_LEAST_WORDS = 1 << 10
_SLAB_WORDS = 1 << 24  # 64 MiB: for some hundred captured launches

_lock = Lock()
_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}
_slabs: list[torch.Tensor] = []  # never freed: graphs have addresses in them
_left: dict[torch.device, torch.Tensor] = {}


def _zeros(words: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(words, dtype=torch.int32, device=device)


def prepare(device: torch.device) -> None:
    """Have room for captured launches; not while anything is being captured."""
    with _lock:
        if device.type == "cpu" or (device in _left and 2 * _left[device].numel() >= _SLAB_WORDS):
            return
        _slabs.append(_zeros(_SLAB_WORDS, device))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # replays may be on any stream
        _left[device] = _slabs[-1]


def counters(words: int, device: torch.device, stream: int, capturing: bool) -> torch.Tensor:
    """So many counters for a launch.

    Args:
        words: how many.
        device: of the launch; the simulator's is the CPU, where each launch gets new ones.
        stream: torch's current one, which the launch goes to.
        capturing: whether that is being captured.
    """
    if device.type == "cpu":
        return _zeros(words, device)
    if capturing:
        with _lock:
            left = _left.get(device)
            if left is not None and left.numel() >= words:
                _left[device] = left[words:]
                return left[:words]
        return _zeros(words, device)  # by the graph itself, at each replay
    prepare(device)
    key = (device, stream)
    kept = _of_streams.get(key)
    if kept is None or kept.numel() < words:
        kept = _of_streams[key] = _zeros(max(words, _LEAST_WORDS), device)
    return kept
