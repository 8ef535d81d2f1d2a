"""``aiter-mx convert``: a checkpoint's linear layers and experts in MX-FP8."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer

from aiter_mx.cli.screen import format_bytes, make_console, make_progress, make_table

_SHOWN = 6  # names beside a reason


def convert(
    source: Annotated[Path, typer.Argument(help="Folder with config.json and *.safetensors.")],
    target: Annotated[Path, typer.Argument(help="New folder for the result.")],
    engine: Annotated[
        str, typer.Option(help="Who loads it: sglang, vllm or transformers.")
    ] = "sglang",
    keep: Annotated[
        list[str] | None, typer.Option(help="Pattern of modules that stay as they are.")
    ] = None,
) -> None:
    """Quantise a checkpoint to MX-FP8.

    It works shard by shard, and when it was stopped goes on from where it was.
    """
    from rich.progress import DownloadColumn

    from aiter_mx.integrations.convert import convert as convert_checkpoint

    console = make_console()
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    with make_progress(DownloadColumn()) as progress:
        task = progress.add_task("reading", total=total)

        def advance(shard: str, count: int) -> None:
            progress.update(task, advance=count, description=shard)

        done = convert_checkpoint(source, target, engine, keep or (), advance)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in done.kept.items():
        by_reason[reason].append(name)
    table = make_table("why it stays as it is", "tensors", "such as", numbers=("tensors",))
    for reason, names in sorted(by_reason.items()):
        more = ", ..." if len(names) > _SHOWN else ""
        table.add_row(reason, str(len(names)), ", ".join(names[:_SHOWN]) + more)
    console.print(table)
    sizes = f"{format_bytes(done.bytes_before)} -> {format_bytes(done.bytes_after)}"
    console.print(f"{len(done.quantised)} weights in MX-FP8, {sizes}, in {target}", soft_wrap=True)
