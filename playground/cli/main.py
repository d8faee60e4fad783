"""Command line: `serve` (default), `generate`, `bench`, `sweep`, `train`, `tune`, `models`, …

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from playground.cli.generate import generate
from playground.cli.options import CommandGroup
from playground.cli.runs import runs
from playground.cli.serve import methods, models, serve
from playground.cli.tune import tune

app = typer.Typer(
    cls=CommandGroup,
    name="app.py",
    help="See, tune and compare speculative decoding on your own machine.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(tune)
app.add_typer(runs)
for command in (serve, generate, models, methods):
    app.command()(command)

Db = Annotated[
    str | None, typer.Option(help="Run log: a SQLite file or any SQLAlchemy URL.", metavar="URL")
]
CacheDir = Annotated[
    Path | None, typer.Option(help="Where fetched weights are kept.", metavar="DIR")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Without a command: serve the page on 127.0.0.1:7860."""
    if context.invoked_subcommand is None:
        serve()


@app.command()
def train(
    method: Annotated[str, typer.Option(help="medusa, eagle, eagle3, redrafter or draft_target.")],
    output: Annotated[
        Path, typer.Option(help="Folder of the drafter; a run that is there goes on.")
    ],
    target: Annotated[
        str, typer.Option(help="Target: preset, local folder, .gguf file or hub id.")
    ] = "smollm2-135m-instruct",
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of the target's texts; default: corpus, beside the output."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens of corpus; what is missing is written first.", min=1)
    ] = 1_000_000,
    rows: Annotated[
        int | None, typer.Option(help="Texts written at a time; default 32, on CUDA 512.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts in Spec-Bench's layout, besides self-made ones."),
    ] = None,
    eval_prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts to measure on, instead of held-out dialogues."),
    ] = None,
    features: Annotated[
        float,
        typer.Option(
            help="GiB of disk, beside the corpus, for what the target shows of it: several "
            "drafters, and several epochs, then read it once.",
            min=0.0,
        ),
    ] = 0.0,
    evals: Annotated[
        int, typer.Option(help="How often acceptance is measured, evenly over the run.", min=1)
    ] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting of the training.", metavar="FIELD=VALUE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of corpus and training.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or q4.")] = "auto",
    device: Device = "auto",
    cache_dir: CacheDir = None,
) -> None:
    """Train a drafter for a target on texts that the target writes itself."""
    from playground.cli.train import TrainOptions, run_train

    run_train(
        TrainOptions(
            target=target,
            method=method,
            output=output,
            corpus=corpus,
            num_tokens=tokens,
            rows=rows,
            prompts=tuple(prompts or ()),
            eval_prompts=tuple(eval_prompts or ()),
            feature_gib=features,
            evals=evals,
            settings=tuple(settings or ()),
            seed=seed,
            dtype=dtype,
            device=device,
            cache_dir=cache_dir,
        )
    )


@app.command()
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help="Suite or file of prompts; repeatable.", metavar="NAME|FILE"),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to measure, by name: ngram,suffix.", metavar="A,B"),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="One more, with settings of its own: 'NGram name=short max_draft_len=3'.",
            metavar="METHOD",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Change a setting of every method, or of one.", metavar="[NAME.]FIELD=V"
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="Target: preset, local folder, .gguf file or hub id.")
    ] = "smollm2-135m-instruct",
    categories: Annotated[
        str | None, typer.Option(help="Only these kinds of task: chat,maths.", metavar="A,B")
    ] = None,
    limit_per_category: Annotated[
        int | None, typer.Option(help="At most so many prompts of each kind of task.", min=1)
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often everything is run.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after EOS.")] = False,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 = off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or q4.")] = "auto",
    device: Device = "auto",
    name: Annotated[str, typer.Option(help="What the benchmark is called in the log.")] = "",
    resume: Annotated[
        str | None, typer.Option(help="Go on with a benchmark of the log.", metavar="ID")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write report.json and CSV tables here.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the speedups as CSV.")] = False,
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Keep the runs in the run log.")
    ] = True,
    db: Db = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure methods against plain decoding over suites of prompts, one request at a time."""
    from playground.cli.bench import BenchOptions, run_bench

    run_bench(
        BenchOptions(
            target=target,
            methods=(*_parts(methods), *(method or ())),
            settings=tuple(settings or ()),
            suites=tuple(suites or ("quick",)),
            categories=_parts(categories),
            limit_per_category=limit_per_category,
            repeats=repeats,
            sampling={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
            },
            limits={"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
            dtype=dtype,
            device=device,
            name=name,
            resume=resume,
            output=output,
            as_json=as_json,
            as_csv=as_csv,
            save=save,
            db=db,
            cache_dir=cache_dir,
        )
    )


def _parts(text: str | None) -> tuple[str, ...]:
    """`a,b` as its parts."""
    return tuple(part for item in (text or "").split(",") if (part := item.strip()))


@app.command()
def sweep(
    method: Annotated[
        str | None, typer.Option(help="Method: preset, FILE.yaml or decoding type.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting to vary: f=1:16, f=1:16:3, f=1:64:log or f=a,b; repeatable.",
            metavar="FIELD=RANGE",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Combinations that the search measures; default 20.", min=1)
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Measure all combinations.")] = False,
    objective: Annotated[
        str, typer.Option(help="What to maximise: tok_s, speedup or mat.")
    ] = "tok_s",
    prune: Annotated[
        bool, typer.Option("--prune", help="Break off trials that are below the median.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a setting that is not varied.", metavar="FIELD=VALUE"),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(help="Drafter weights: folder, hub id or preset; or module:Class."),
    ] = None,
    target: Annotated[
        str, typer.Option(help="Target: preset, local folder, .gguf file or hub id.")
    ] = "smollm2-135m-instruct",
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help="Suite or file of prompts; repeatable.", metavar="NAME|FILE"),
    ] = None,
    categories: Annotated[
        str | None, typer.Option(help="Only these kinds of task: chat,maths.", metavar="A,B")
    ] = None,
    limit_per_category: Annotated[
        int, typer.Option(help="At most so many prompts of each kind of task.", min=1)
    ] = 1,
    repeats: Annotated[int, typer.Option(help="How often a trial asks every prompt.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after EOS.")] = False,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 = all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 = off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the search and of every random draw.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or q4.")] = "auto",
    device: Device = "auto",
    name: Annotated[str, typer.Option(help="What the sweep is called.")] = "",
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with a sweep; --trials may raise its number.", metavar="NAME"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the best settings here.", metavar="FILE.yaml")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    db: Db = None,
    cache_dir: CacheDir = None,
) -> None:
    """Measure many settings of one method and find the best, by search or grid."""
    from playground.cli.sweep import SweepOptions, run_sweep_command

    run_sweep_command(
        SweepOptions(
            target=target,
            method=method,
            settings=tuple(settings or ()),
            drafter=drafter,
            vary=tuple(vary or ()),
            grid=grid,
            trials=trials,
            objective=objective,
            prune=prune,
            suites=tuple(suites or ("quick",)),
            categories=_parts(categories),
            limit_per_category=limit_per_category,
            repeats=repeats,
            sampling={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "seed": seed,
            },
            limits={"max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
            dtype=dtype,
            device=device,
            name=name,
            resume=resume,
            output=output,
            as_json=as_json,
            db=db,
            cache_dir=cache_dir,
        )
    )


@app.command()
def export(
    to: Annotated[
        str, typer.Option(help="trtllm, vllm, sglang, triton, llamacpp or transformers.")
    ],
    run: Annotated[
        str | None, typer.Option(help="Run of the log: its method and target.", metavar="ID")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method: preset, FILE.yaml or decoding type.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one setting of the method.", metavar="FIELD=VALUE"),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter weights: folder, hub id or shipped drafter.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Target: preset, path or hub id; default: the run's or method's."),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Release of the engine; default: the newest known.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the files here.", metavar="DIR")
    ] = None,
    db: Db = None,
) -> None:
    """Write the config of another engine for a method, and say what is lost on the way."""
    from playground.cli.export import ExportOptions, run_export

    run_export(
        ExportOptions(
            run=run,
            method=method,
            settings=tuple(settings or ()),
            drafter=drafter,
            target=target,
            to=to,
            engine_version=engine_version,
            output=output,
            db=db,
        )
    )


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(help="The config; - reads it from stdin.")],
    source: Annotated[
        str,
        typer.Option("--from", help="trtllm, vllm, sglang, triton, llamacpp or transformers."),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Write the method here.", metavar="FILE.yaml")
    ] = None,
) -> None:
    """Read another engine's config as a method file for `generate --method`."""
    from playground.cli.export import ImportOptions, run_import

    run_import(ImportOptions(file=file, source=source, output=output))
