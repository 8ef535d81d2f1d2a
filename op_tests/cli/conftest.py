"""What tests of the command line share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from aiter_mx.cli.main import main


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: its exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aiter-mx", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        code = exit_.value.code
        return (code if isinstance(code, int) else 0), out, err

    return run


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    """Assert that a command ended in one message, with status 1."""
    status, out, err = result
    assert status == 1
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert out == ""
