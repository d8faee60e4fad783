"""Command line of `runs`: `list`, `export`, `import`, `tag`, `delete`, `restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

runs = typer.Typer(
    name="runs",
    help="List, export, import, tag and delete the runs of the log.",
    no_args_is_help=True,
)

Db = Annotated[
    str | None, typer.Option(help="Run log: a SQLite file or any SQLAlchemy URL.", metavar="URL")
]
Ids = Annotated[list[str], typer.Argument(help="Ids of runs.", metavar="ID…")]
Search = Annotated[
    str, typer.Option(help="Text of prompt, name, note, method or target, whatever the case.")
]
Target = Annotated[str | None, typer.Option(help="Only runs of this target.")]
Method = Annotated[str | None, typer.Option(help="Only runs of this method, by title.")]
Status = Annotated[
    str | None,
    typer.Option(help="completed, cancelled, failed, interrupted, running or deleted."),
]
Tag = Annotated[str | None, typer.Option(help="Only runs with this tag.")]
Label = Annotated[
    list[str] | None,
    typer.Option(help="Only runs with this label; repeatable.", metavar="KEY=VALUE"),
]
Benchmark = Annotated[str | None, typer.Option(help="Only runs of this benchmark.", metavar="ID")]


@runs.command("list")
def list_(
    search: Search = "",
    target: Target = None,
    method: Method = None,
    status: Status = None,
    tag: Tag = None,
    label: Label = None,
    benchmark: Benchmark = None,
    sort: Annotated[
        str, typer.Option(help="Figure or field: created_at, tok_s, mat, ttft_s, num_steps, …")
    ] = "created_at",
    ascending: Annotated[bool, typer.Option("--ascending", help="Smallest first.")] = False,
    limit: Annotated[int, typer.Option(help="Most runs to print.", min=1, max=1000)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    db: Db = None,
) -> None:
    """Print runs, the newest first."""
    from playground.cli.runs_command import Choice, run_list

    choice = Choice(search, target, method, status, tag, tuple(label or ()), benchmark)
    run_list(db, choice, sort=sort, descending=not ascending, limit=limit, as_json=as_json)


@runs.command()
def export(
    file: Annotated[
        Path,
        typer.Argument(help="FILE.json, FILE.json.gz or FILE.csv; - prints JSON.", metavar="FILE"),
    ],
    ids: Annotated[list[str] | None, typer.Argument(help="Only these runs.", metavar="ID…")] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="CSV: a line per step instead of a line per run.")
    ] = False,
    search: Search = "",
    target: Target = None,
    method: Method = None,
    status: Status = None,
    tag: Tag = None,
    label: Label = None,
    benchmark: Benchmark = None,
    db: Db = None,
) -> None:
    """Write runs to a file, oldest first: JSON has all of them, with every step."""
    from playground.cli.runs_command import Choice, run_export

    choice = Choice(
        search, target, method, status, tag, tuple(label or ()), benchmark, tuple(ids or ())
    )
    run_export(db, choice, file, steps=steps)


@runs.command("import")
def import_(
    files: Annotated[
        list[Path], typer.Argument(help="Exported JSON files.", metavar="FILE…", exists=True)
    ],
    db: Db = None,
) -> None:
    """Add exported runs to the log; a run that is here already is left as it is."""
    from playground.cli.runs_command import run_import

    run_import(db, files)


@runs.command("tag")
def tag_(
    ids: Ids,
    add: Annotated[list[str] | None, typer.Option(help="Add this tag; repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove this tag.")] = None,
    db: Db = None,
) -> None:
    """Add tags to runs, or take them off."""
    from playground.cli.runs_command import run_tag

    run_tag(db, ids, add=add or [], remove=remove or [])


@runs.command()
def delete(ids: Ids, db: Db = None) -> None:
    """Hide runs; `restore` brings them back."""
    from playground.cli.runs_command import run_delete

    run_delete(db, ids, restore=False)


@runs.command()
def restore(ids: Ids, db: Db = None) -> None:
    """Show deleted runs again."""
    from playground.cli.runs_command import run_delete

    run_delete(db, ids, restore=True)
