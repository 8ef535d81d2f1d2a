"""Entry point of ``aiter-mx``: one file a command, and one line of text for what goes wrong."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from aiter_mx._version import __version__
from aiter_mx.cli import build, cache, convert, demo, explain, info, isa, tables, tune
from aiter_mx.errors import AiterMxError

FIELDS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that take an op's own fields as options."""

app = typer.Typer(
    help="MX-FP8 kernels: what runs where, why, and how it was built.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"aiter-mx {__version__}")
        raise typer.Exit


@app.callback()
def _of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """MX-FP8 kernels: what runs where, why, and how it was built."""


app.command()(info.info)
app.command()(demo.demo)
app.command()(convert.convert)
app.command(context_settings=FIELDS)(explain.explain)
app.command(context_settings=FIELDS, options_metavar="[OP] [OPTIONS]")(build.build)
app.command(context_settings=FIELDS)(isa.isa)
app.command(context_settings=FIELDS)(tune.tune)
app.add_typer(tables.app, name="tables")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; wrong input, files and the package's errors end with exit status 1.

    Whoever reads the output may stop to, as ``head`` does: that is no error to speak of.
    """
    if sys.stdout is None:  # closed by the shell, as >&- does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would be written, and fail, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (AiterMxError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
