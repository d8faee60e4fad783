"""Options of the command line, each declared once, as dataclasses that commands combine.

    @dataclass(kw_only=True)
    class GenerateOptions(ModelOptions, SamplingOptions): ...

    @app.command()
    @command(GenerateOptions)
    def generate(options: GenerateOptions) -> None: ...

A field made by `option` or `argument` is a parameter of the command. Nothing heavy is imported,
so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from engine.safe_text import read_text
from playground.cli.streams import note

if TYPE_CHECKING:
    from engine.config import Limits, Sampling
    from engine.drafters.method import MethodConfig
    from engine.model.sources import TargetSpec
    from playground.host.models import Models
    from storage import RunLog

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


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function of an options dataclass into a command whose parameters are its fields."""
    hints = get_type_hints(options)

    def parameter(one: Any) -> inspect.Parameter:
        value = one.default_factory() if one.default_factory is not MISSING else one.default
        default = inspect.Parameter.empty if value is MISSING else value
        kind = inspect.Parameter.KEYWORD_ONLY
        hint = Annotated[hints[one.name], one.metadata["typer"]]  # type: ignore[valid-type]
        return inspect.Parameter(one.name, kind, default=default, annotation=hint)

    def decorate(run: Callable[[Options], None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            run(options(**values))

        call.__name__, call.__doc__ = run.__name__, run.__doc__
        parameters = [parameter(one) for one in fields(options)]  # type: ignore[arg-type]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        return call

    return decorate


def split_list(text: str | None) -> tuple[str, ...]:
    """The items of `a,b`."""
    return tuple(part for item in (text or "").split(",") if (part := item.strip()))


@dataclass(kw_only=True)
class DeviceOptions:
    """The device, and the folder of the weights."""

    device: str = option(
        "auto",
        "auto, cpu, cuda, cuda:N; several: balanced or cuda:0,cuda:1=20GiB,cpu,disk.",
    )
    cache_dir: Path | None = option(None, "Where fetched weights are kept.", metavar="DIR")

    @property
    def cache(self) -> Path:
        from playground.host import paths

        return self.cache_dir or paths.cache_dir()

    @contextmanager
    def models(self, spec: TargetSpec, dtype: str) -> Iterator[Models]:
        """The loaded target and its drafters; freed at the end."""
        import presets
        from playground.cli.terminal import Terminal, plain
        from playground.host.models import Models

        models = Models(cache_dir=self.cache, device=self.device, resolve=presets.resolve)
        try:
            with Terminal(stderr=True).status(plain(f"loading {spec.name}")) as status:
                tell = lambda message, _: status.update(plain(message))  # noqa: E731
                models.target(spec, dtype, tell)
            yield models
        finally:
            models.close()


@dataclass(kw_only=True)
class TargetOptions(DeviceOptions):
    """The target and its device."""

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

    def config(self) -> MethodConfig:
        """Raises ConfigError: an unknown method or setting."""
        from playground.host.methods import choose_method

        return choose_method(self.method, self.settings, self.drafter, report=note)


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

    @property
    def sampling(self) -> Sampling:
        """Raises ConfigError: a value is out of range, or a file cannot be read."""
        from engine.config import Sampling

        names = ("temperature", "top_k", "top_p", "min_p", "verification", "seed")
        return Sampling.parse({name: getattr(self, name) for name in names} | self._structure())

    def _structure(self) -> dict[str, str]:
        """The settings of structured output, if any."""
        from engine.errors import ConfigError

        named = ("json_schema", "regex", "grammar")
        values = {name: text for name in named if (text := getattr(self, name)) is not None}
        if len(values) > 1:
            raise ConfigError("Give one of --json-schema, --regex and --grammar.")
        for kind, text in values.items():
            is_inline = kind == "regex" or ("{" if kind == "json_schema" else ":") in text
            grammar = text if is_inline else read_text(Path(text))
            return {"structured_output": kind, "grammar": grammar}
        return {}

    def limits(self, **more: Any) -> Limits:
        """Raises ConfigError: a value is out of range."""
        from engine.config import Limits

        own = {"max_new_tokens": self.max_new_tokens, "ignore_eos": self.ignore_eos}
        return Limits.parse({**own, **more})


@dataclass(kw_only=True)
class LogOptions:
    db: str | None = option(None, "Run log: a SQLite file or a PostgreSQL URL.", metavar="URL")

    @property
    def log_url(self) -> str:
        from playground.host import paths

        return self.db or str(paths.run_log())

    def open_log(self) -> RunLog:
        """A context manager, as every `RunLog`."""
        from storage import RunLog

        return RunLog.open(self.log_url)
