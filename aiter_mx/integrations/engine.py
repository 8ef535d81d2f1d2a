"""How a plug-in puts itself into an engine: whole, or not at all with one line that says why."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aiter_mx._version import __version__


class Incompatible(Exception):
    """The engine is not what its adapter was written for."""


def activate(
    engine: str, known: Sequence[str], patch: Callable[[], None], log: logging.Logger
) -> bool:
    """Patch an engine unless it, or ``AITER_MX_<ENGINE>``, says no.

    Args:
        engine: name of its package.
        known: beginnings of the versions that the adapter was tested with, such as ``"0.33."``.
        patch: checks everything that it uses, then changes the engine.
        log: where the engine's users look.

    Returns:
        Whether the engine calls this package now.

    Raises:
        ValueError: the variable is neither 0, 1 nor ``require``.
        Incompatible: it is ``require``, and the engine is not known or has changed.
    """
    variable = f"AITER_MX_{engine.upper()}"
    wish = os.environ.get(variable, "1")
    if wish not in ("0", "1", "require"):
        raise ValueError(f"{variable} must be 0, 1 or require, got {wish!r}")
    if wish == "0":
        return False
    try:
        found = version(engine)
    except PackageNotFoundError:
        found = str(getattr(sys.modules.get(engine), "__version__", "of no known version"))
    try:
        if not f"{found}.".startswith(tuple(known)):
            tested = ", ".join(f"{each}x" for each in known)
            raise Incompatible(f"it was tested with {tested}")
        patch()
    except (Incompatible, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())  # an import's may have several lines
        message = (
            f"aiter_mx {__version__} leaves {engine} {found} as it is: {reason} "
            f"({variable}=0 silences this)"
        )
        if wish == "require":
            raise Incompatible(message) from error
        log.warning(message)
        return False
    return True


@cache
def say_once(log: logging.Logger, line: str) -> None:
    """Say in the log what many layers have in common."""
    log.info(line)


def expect(function: Callable[..., Any], *parameters: str) -> None:
    """Check that a function of the engine has these parameters.

    Raises:
        Incompatible: it has not.
    """
    found = inspect.signature(function).parameters
    missing = [each for each in parameters if each not in found]
    if missing:
        name = f"{function.__module__}.{function.__qualname__}"
        raise Incompatible(
            f"{name} has no parameter {', '.join(missing)}, it has {', '.join(found)}"
        )


def expect_names(owner: Any, *names: str) -> None:
    """Check that a module or class of the engine has these.

    Raises:
        Incompatible: it has not.
    """
    for name in names:
        if not hasattr(owner, name):
            raise Incompatible(f"{getattr(owner, '__name__', owner)} has no {name}")


def replace_everywhere(engine: str, name: str, original: Any, replacement: Any) -> None:
    """Put a function in another's place in every module of the engine that has imported it."""
    for module_name, module in list(sys.modules.items()):
        inside = module_name == engine or module_name.startswith(f"{engine}.")
        if inside and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)
