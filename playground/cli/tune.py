"""Command line of `tune`: `ranks`, `fit`, `latency`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

tune = typer.Typer(
    name="tune",
    help="Fit draft trees to what a drafter really ranked, and measure what they cost.",
    no_args_is_help=True,
)

Target = Annotated[
    str | None,
    typer.Option(help="Target: preset, local folder, .gguf file or hub id; default: the runs'."),
]
Method = Annotated[str, typer.Option(help="Method: preset, FILE.yaml or decoding type.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change one setting of the method.", metavar="FIELD=VALUE"),
]
Drafter = Annotated[
    str | None, typer.Option(help="Drafter weights: folder, hub id or shipped drafter.")
]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16, float16 or q4; default: the runs'.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Db = Annotated[
    str | None, typer.Option(help="Run log: a SQLite file or any SQLAlchemy URL.", metavar="URL")
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where fetched weights are kept.", metavar="DIR")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@tune.command()
def ranks(
    method: Method,
    runs: Annotated[
        str | None, typer.Option(help="Runs of the log, by id: ID,ID.", metavar="ID,ID")
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option(help="All runs of a benchmark of the log.", metavar="ID")
    ] = None,
    depths: Annotated[
        int, typer.Option(help="How deep to rank; for look-up, the longest draft.", min=1, max=64)
    ] = 8,
    target: Target = None,
    settings: Changes = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = "auto",
    db: Db = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure which ranks a drafter gave to the true tokens of stored texts."""
    from playground.cli.tune_command import DrafterOptions, RanksOptions, run_ranks

    run_ranks(
        RanksOptions(
            drafter=DrafterOptions(
                target=target,
                method=method,
                settings=tuple(settings or ()),
                drafter=drafter,
                dtype=dtype,
                device=device,
                db=db,
                cache_dir=cache_dir,
            ),
            runs=tuple(part.strip() for part in (runs or "").split(",") if part.strip()),
            benchmark=benchmark,
            depths=depths,
        )
    )


@tune.command()
def fit(
    nodes: Annotated[
        str, typer.Option(help="Sizes of tree, in drafted nodes: 8,16,32.", metavar="N,N")
    ] = "8,16,32,63",
    table: Annotated[
        str | None, typer.Option(help="Rank table; default: the newest.", metavar="ID")
    ] = None,
    max_depth: Annotated[int | None, typer.Option(help="Longest path.", min=1)] = None,
    max_width: Annotated[
        int | None, typer.Option(help="Ranks used: 0 up to one less than this.", min=1)
    ] = None,
    category: Annotated[str | None, typer.Option(help="Only texts of this kind of task.")] = None,
    held_out: Annotated[
        int, typer.Option(help="Judge by one text in so many, fit to the others; 0 = off.", min=0)
    ] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Write a preset per size here.", metavar="DIR")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="First part of the presets' names.", metavar="NAME")
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="What the texts answer, for the preset: a suite's name.")
    ] = "",
    as_json: Json = False,
    db: Db = None,
) -> None:
    """Fit the best tree of every size to a rank table, beside the published trees."""
    from playground.cli.tune_command import FitOptions, run_fit

    run_fit(
        FitOptions(
            table=table,
            nodes=nodes,
            max_depth=max_depth,
            max_width=max_width,
            category=category,
            held_out=held_out,
            output=output,
            name=name,
            prompts=prompts,
            as_json=as_json,
            db=db,
        )
    )


@tune.command()
def latency(
    method: Method,
    context_len: Annotated[
        int, typer.Option("--context", help="Tokens of context; the nearest bucket is measured.")
    ] = 256,
    again: Annotated[bool, typer.Option("--again", help="Measure what is known as well.")] = False,
    target: Target = None,
    settings: Changes = None,
    drafter: Drafter = None,
    dtype: Dtype = None,
    device: Device = "auto",
    as_json: Json = False,
    db: Db = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure what verifying, drafting and the loop itself cost on this machine."""
    from playground.cli.tune_command import DrafterOptions, LatencyOptions, run_latency

    run_latency(
        LatencyOptions(
            drafter=DrafterOptions(
                target=target,
                method=method,
                settings=tuple(settings or ()),
                drafter=drafter,
                dtype=dtype,
                device=device,
                db=db,
                cache_dir=cache_dir,
            ),
            context_len=context_len,
            again=again,
            as_json=as_json,
        )
    )
