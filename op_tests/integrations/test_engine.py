"""How plug-ins put themselves into engines, with an engine made up here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

import aiter_mx
from aiter_mx.integrations import engine as engine_module
from aiter_mx.integrations.engine import (
    Incompatible,
    activate,
    expect,
    expect_names,
    replace_everywhere,
)

LOG = logging.getLogger("op_tests.engine")


def chooser(config: object, other: int = 0) -> str:
    return "theirs"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An engine ``fakengine`` 3.1.4 whose two modules have the same function."""
    module, user, stranger = (
        ModuleType(name) for name in ("fakengine", "fakengine.user", "fakengine_of_others")
    )
    for each in (module, user, stranger):
        each.chooser = chooser
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr(engine_module, "version", lambda name: "3.1.4")
    monkeypatch.delenv("AITER_MX_FAKENGINE", raising=False)
    yield module


def patch() -> None:
    expect(chooser, "config")
    replace_everywhere("fakengine", "chooser", chooser, lambda config, other=0: "ours")


def test_engine_is_patched_wherever_the_name_was_imported(fake: ModuleType) -> None:
    assert activate("fakengine", ("3.1.",), patch, LOG)
    assert fake.chooser(None) == sys.modules["fakengine.user"].chooser(None) == "ours"
    assert sys.modules["fakengine_of_others"].chooser(None) == "theirs"


def test_variable_turns_it_off(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_FAKENGINE", "0")
    assert not activate("fakengine", ("3.1.",), patch, LOG)
    assert fake.chooser(None) == "theirs"


def changed() -> None:
    expect(chooser, "config", "hints")
    raise AssertionError("what follows a failed check must not run")


def vanished() -> None:
    expect_names(sys.modules["fakengine"], "chooser", "oracle")


def broken() -> None:
    raise ImportError("\nneeds what is not here.\n Install it.\n")


@pytest.mark.parametrize(
    ("known", "apply", "reason"),
    [
        (("3.0.", "2."), patch, r"it was tested with 3\.0\.x, 2\.x"),
        (("3.1.",), changed, r"chooser has no parameter hints, it has config, other"),
        (("3.1.",), vanished, r"fakengine has no oracle"),
        (("3.1.",), broken, r"as it is: needs what is not here\. Install it\. \(AITER"),
    ],
)
def test_another_engine_runs_as_it_is_with_one_warning(
    fake: ModuleType,
    known: tuple[str, ...],
    apply: object,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not activate("fakengine", known, apply, LOG)
    assert fake.chooser(None) == "theirs"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"aiter_mx {aiter_mx.__version__} leaves fakengine 3.1.4 as it is" in record.message
    monkeypatch.setenv("AITER_MX_FAKENGINE", "require")
    with pytest.raises(Incompatible, match=reason):
        activate("fakengine", known, apply, LOG)


def test_unknown_wish_is_refused(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITER_MX_FAKENGINE", "yes")
    with pytest.raises(ValueError, match="AITER_MX_FAKENGINE must be 0, 1 or require, got 'yes'"):
        activate("fakengine", ("3.1.",), patch, LOG)
