"""``aiter-mx cache``: what the JIT has stored."""

from __future__ import annotations

from datetime import datetime

import typer

from aiter_mx.cli.screen import format_bytes, make_console, make_table

app = typer.Typer(help="List or clear what was compiled.", no_args_is_help=True)


@app.command("list")
def list_artifacts() -> None:
    """List what the cache folder holds."""
    from aiter_mx.jit.contents import entries
    from aiter_mx.jit.folder import cache_dir

    console = make_console()
    found = entries()
    table = make_table("kind", "key", "size", "built", "state", "what", numbers=("size",))
    for entry in found:
        table.add_row(
            entry.kind,
            entry.key[:12],
            format_bytes(entry.size_bytes),
            f"{datetime.fromtimestamp(entry.built_at):%Y-%m-%d %H:%M}",
            "intact" if entry.intact else "altered",
            entry.describe,
        )
    if found:
        console.print(table)
    size = format_bytes(sum(entry.size_bytes for entry in found))
    console.print(f"{len(found)} artifacts, {size}, in {cache_dir()}", soft_wrap=True)


@app.command("clear")
def clear_artifacts() -> None:
    """Delete what was compiled.

    What is needed again is compiled again. Files that the folder's manifest does not name stay.
    """
    from aiter_mx.jit.contents import clear
    from aiter_mx.jit.folder import cache_dir

    make_console().print(f"{clear()} artifacts deleted from {cache_dir()}", soft_wrap=True)
