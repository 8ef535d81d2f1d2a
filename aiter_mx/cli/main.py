"""Entry point of ``aiter-mx``: one file a command, and one line of text for what goes wrong."""

from __future__ import annotations

import sys

import typer

from aiter_mx.cli import build, cache, demo, explain, info, isa, tables, tune
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
app.command()(info.info)
app.command()(demo.demo)
app.command(context_settings=FIELDS)(explain.explain)
app.command(context_settings=FIELDS, options_metavar="[OP] [OPTIONS]")(build.build)
app.command(context_settings=FIELDS)(isa.isa)
app.command(context_settings=FIELDS)(tune.tune)
app.add_typer(tables.app, name="tables")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; wrong input, files and the package's errors end with exit status 1."""
    try:
        app()
    except (AiterMxError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
