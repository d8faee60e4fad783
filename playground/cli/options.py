"""Options of the command line, each declared once, as dataclasses that commands combine.

    @command(app, "generate", "generate:generate")
    class GenerateOptions(ModelOptions, SamplingOptions):
        "Generate from one prompt and print the text as it is decoded."

A field made by `option` or `argument` is a parameter of the command; the docstring is its help.
Nothing heavy is imported here, so that `--help` answers at once: the module of a command is
imported when the command runs.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.core import TyperGroup

from engine.errors import PlaygroundError
from engine.safe_text import as_text, disk_is_full, write_error_text
from playground.cli.streams import EXIT_INTERRUPTED, note

EXIT_USER_ERROR = 2
EMBEDDED = "smollm2-135m-instruct"
Options = TypeVar("Options")
REQUIRED: Any = MISSING
METHOD_HELP = "Method: preset, FILE.yaml (ours or TensorRT-LLM's) or decoding type."


def option(default: Any, help: str, *names: str, **more: Any) -> Any:
    """A field that is an option; `REQUIRED` means no default."""
    return _field(default, typer.Option(*names, help=help, **more))


def argument(default: Any, help: str, **more: Any) -> Any:
    return _field(default, typer.Argument(help=help, **more))


def _field(default: Any, parameter: Any) -> Any:
    metadata = {"typer": parameter}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass_transform(kw_only_default=True)
def command(app: typer.Typer, name: str, where: str) -> Callable[[type[Options]], type[Options]]:
    """Decorates options of a command that calls `module:function` of this package with them."""

    def decorate(cls: type[Options]) -> type[Options]:
        options = dataclass(kw_only=True)(cls)

        def call(**values: Any) -> None:
            call_command(where, options(**values))

        hints = get_type_hints(options)
        parameters = [_parameter(one, hints[one.name]) for one in fields(options)]  # type: ignore[arg-type]
        call.__doc__ = cls.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        app.command(name)(call)
        return options

    return decorate


def call_command(where: str, options: object) -> None:
    """Import `module:function` of this package, and call it."""
    module, _, function = where.partition(":")
    getattr(import_module(f"playground.cli.{module}"), function)(options)


def _parameter(one: Any, hint: Any) -> inspect.Parameter:
    value = one.default_factory() if one.default_factory is not MISSING else one.default
    default = inspect.Parameter.empty if value is MISSING else value
    annotation = Annotated[hint, one.metadata["typer"]]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(one.name, kind, default=default, annotation=annotation)


class CommandGroup(TyperGroup):
    """Reports the playground's own errors as one sentence on stderr."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            for argument in ctx.args:
                as_text(argument, what=f"The argument {argument[:40]!r}")
            result = super().invoke(ctx)
            sys.stdout.flush()  # raises here if the disk is full, so that it is reported
            return result
        except KeyboardInterrupt as error:
            note("Stopped.")
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has closed the pipe
                raise
            # Else Python flushes to the failed stream again at exit.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            what = error.filename or "The output"
            full = disk_is_full(error)
            reason = (
                write_error_text(what, error) if full else f"{what}: {error.strerror or error}."
            )
            note(f"error: {reason:.2000}")
            raise typer.Exit(EXIT_USER_ERROR) from error
        except Exception as error:
            storage = sys.modules.get("storage")  # not imported here: --help does without it
            of_storage = (storage.StorageError,) if storage else ()
            if not isinstance(error, (PlaygroundError, *of_storage)):
                raise
            note(f"error: {error!s:.2000}")
            raise typer.Exit(EXIT_USER_ERROR) from error


# ---- options that several commands have


@dataclass(kw_only=True)
class DeviceOptions:
    """The device, and the folder of the weights."""

    device: str = option(
        "auto",
        "auto, cpu, cuda, cuda:N; several: balanced or cuda:0,cuda:1=20GiB,cpu,disk.",
    )
    cache_dir: Path | None = option(None, "Where fetched weights are kept.", metavar="DIR")


@dataclass(kw_only=True)
class TargetOptions(DeviceOptions):
    target: str = option(EMBEDDED, "Target: preset, local folder, .gguf file or hub id.")
    dtype: str = option("auto", "auto, float32, bfloat16, float16, q8 or q4.")


@dataclass(kw_only=True)
class MethodOptions:
    method: str = option(REQUIRED, METHOD_HELP)
    settings: list[str] = option(
        [], "Change one setting of the method.", "--set", metavar="FIELD=VALUE"
    )
    drafter: str | None = option(
        None, "Drafter weights: folder, hub id or preset; or module:Class."
    )


@dataclass(kw_only=True)
class SamplingOptions:
    """Sampling, length and structure of the text."""

    temperature: float = option(0.0, "0 = greedy.")
    top_k: int = option(0, "Keep the k likeliest tokens; 0 = all.")
    top_p: float = option(1.0, "Nucleus sampling; 1 = off.")
    min_p: float = option(0.0, "Keep tokens of this share of the best one's probability; 0 = all.")
    verification: str = option("block", "How chains drawn at random are verified: block or token.")
    seed: int = option(0, "Seed of every random draw.")
    max_new_tokens: int = option(256, "Maximum number of tokens per answer.")
    ignore_eos: bool = option(False, "Continue past EOS.", "--ignore-eos")
    json_schema: str | None = option(
        None, "JSON schema that the text must follow: FILE, or the schema.", metavar="FILE|TEXT"
    )
    regex: str | None = option(None, "Regular expression that the whole text must match.")
    grammar: str | None = option(
        None, "Lark or GBNF grammar the text must follow: FILE, or itself.", metavar="FILE|TEXT"
    )
    thinking: bool | None = option(
        None, "Whether a reasoning model thinks; default: as its chat template has it."
    )
    chat_template_kwarg: list[str] = option(
        [], "A variable that the chat template reads: reasoning_effort=low.", metavar="NAME=VALUE"
    )


@dataclass(kw_only=True)
class LogOptions:
    db: str | None = option(None, "Run log: a SQLite file or a PostgreSQL URL.", metavar="URL")


@dataclass(kw_only=True)
class ExperimentOptions(LogOptions, SamplingOptions, TargetOptions):
    """What `bench` and `sweep` share: the target, the prompts, and where they run."""

    suites: list[str] = option(
        ["quick"], "Suite or file of prompts; repeatable.", "--suite", metavar="NAME|FILE"
    )
    categories: str | None = option(None, "Only these kinds of task: chat,maths.", metavar="A,B")
    limit_per_category: int | None = option(
        None, "Maximum number of prompts of each kind of task.", min=1
    )
    repeats: int = option(1, "How many times everything is run.", min=1)
    name: str = option("", "Name of the experiment in the log.")
    ray: str | None = option(
        None, "Run on a Ray cluster: local, auto or its address.", metavar="ADDRESS"
    )
    workers: int | None = option(None, "Ray workers; default: as many as fit.", min=1)
    worker_cpus: int | None = option(None, "Cores of a Ray worker; default: a node's.", min=1)
    worker_gpus: float | None = option(
        None, "GPUs of a Ray worker; default: 1 where there is one.", min=0.0
    )


@dataclass(kw_only=True)
class FilterOptions(LogOptions):
    """Which runs of the log."""

    search: str = option("", "Text in the prompt, name, note, method or target, ignoring case.")
    status: str | None = option(
        None, "completed, cancelled, failed, interrupted, running, or deleted: hidden until erased."
    )
    filters: list[str] = option(
        [],
        "Only these, such as target=NAME, method_title=TITLE, tag=TAG or label:KEY=VALUE; "
        "repeatable.",
        "--filter",
        metavar="FIELD=VALUE",
    )
