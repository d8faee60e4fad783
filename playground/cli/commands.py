"""What the command line's commands do."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

import presets
from engine.config import Limits, MethodConfig, Sampling
from engine.decode import decode
from engine.drafters import methods as decoding_types
from engine.errors import ConfigError, PlaygroundError, PromptError
from engine.metrics import Metrics, Tally
from engine.model.target import Target
from engine.model.text import Detokenizer, whole_text
from engine.steps import End, Prefill, Record, Step
from playground.host import paths, trace
from playground.host.models import Models
from playground.host.recording import record_run
from playground.web.method_choice import choose_method
from storage import RunLog, StorageError

EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Options of `generate`, as given."""

    prompt: str | None
    prompt_ids: str | None
    raw: bool
    system: str | None
    target: str
    method: str
    settings: tuple[str, ...]
    drafter: str | None
    dtype: str
    device: str
    sampling: Mapping[str, Any]
    limits: Mapping[str, Any]
    as_json: bool
    trace: Path | None
    save: bool
    db: str | None
    cache_dir: Path | None


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Our own errors end the command with one line on stderr."""
    try:
        yield
    except (PlaygroundError, StorageError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USER_ERROR) from error


def run_serve(
    *,
    host: str,
    port: int,
    db: str | None,
    cache_dir: Path | None,
    device: str,
    drafters: Sequence[str],
    open_browser: bool,
) -> None:
    """Serve the page until interrupted."""
    from playground.web.server import serve

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("playground").setLevel(logging.INFO)
    with _errors_as_sentences():
        serve(
            host=host,
            port=port,
            db=db or str(paths.run_log()),
            cache_dir=cache_dir or paths.cache_dir(),
            device=device,
            drafters=drafters,
            open_browser=open_browser,
        )


def run_generate(options: GenerateOptions) -> None:
    """Load, decode, print; trace and log on the way."""
    with _errors_as_sentences(), ExitStack() as stack:
        config = choose_method(options.method, options.settings, options.drafter)
        sampling = Sampling.parse(options.sampling)
        limits = Limits.parse(options.limits)
        models = Models(
            cache_dir=options.cache_dir or paths.cache_dir(),
            device=options.device,
            resolve=presets.resolve,
        )
        stack.callback(models.close)
        target = models.target(presets.resolve(options.target), options.dtype, _progress)
        drafter = models.drafter(config)
        messages, prompt_text, prompt_ids = _prompt(options, target)
        log = RunLog.open((options.db or str(paths.run_log())) if options.save else None)
        stack.callback(log.close)
        recording = stack.enter_context(
            record_run(
                log,
                target,
                config,
                sampling=sampling,
                limits=limits,
                prompt_ids=prompt_ids,
                prompt_text=prompt_text,
                messages=messages,
            )
        )
        records = decode(target, drafter, prompt_ids, sampling=sampling, limits=limits)
        output = _Output(options, target, config, prompt_ids, sampling, limits, stack)
        for record in records:
            recording.put(record)
            output.take(record)
    output.finish(recording.run_id if options.save else None)


class _Output:
    """Prints the text as it comes, or one JSON object; writes the trace."""

    def __init__(
        self,
        options: GenerateOptions,
        target: Target,
        config: MethodConfig,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        stack: ExitStack,
    ) -> None:
        self._options = options
        self._target = target
        self._config = config
        self._stop = limits.stop
        self._tally = Tally()
        self._pieces = Detokenizer(target.tokenizer)
        self._end: End | None = None
        self._text = ""
        self._stream = None
        if options.trace is not None:
            self._stream = stack.enter_context(_open_trace(options.trace))
            trace.write(self._stream, trace.run_line(target, config, prompt_ids, sampling))

    def take(self, record: Record) -> None:
        self._tally.add(record)
        if isinstance(record, Prefill):
            self._print([record.token_id])
        elif isinstance(record, Step):
            if self._stream is not None:
                trace.write(self._stream, trace.step_line(record))
            self._print(record.committed[: record.num_committed])
        else:
            self._end = record
            self._text = whole_text(self._target.tokenizer, record.output_ids, self._stop)
            if self._stream is not None:
                line = trace.end_line(record, self._text, self._tally.metrics)
                trace.write(self._stream, line)

    def _print(self, token_ids: Sequence[int]) -> None:
        if not self._options.as_json and not self._stop:
            for token_id in token_ids:
                sys.stdout.write(self._pieces.push(token_id))
            sys.stdout.flush()

    def finish(self, run_id: str | None) -> None:
        assert self._end is not None
        metrics = self._tally.metrics
        if self._options.as_json:
            typer.echo(json.dumps(self._summary(metrics, run_id), ensure_ascii=False, indent=2))
            return
        sys.stdout.write(self._text if self._stop else self._pieces.flush())
        typer.echo()
        typer.echo(_figures(self._config, metrics, self._end, run_id), err=True)

    def _summary(self, metrics: Metrics, run_id: str | None) -> dict[str, Any]:
        assert self._end is not None
        return {
            "run_id": run_id,
            "target": self._target.name,
            "method": self._config.model_dump(mode="json"),
            "lossless": self._config.lossless,
            "text": self._text,
            "output_ids": list(self._end.output_ids),
            "finish_reason": self._end.finish_reason,
            "metrics": asdict(metrics),
        }


def _figures(config: MethodConfig, metrics: Metrics, end: End, run_id: str | None) -> str:
    def show(value: float | None, unit: str, digits: int = 2) -> str:
        return "–" if value is None else f"{value:.{digits}f}{unit}"

    parts = [
        f"{type(config).title}{'' if config.lossless else ' (lossy)'}",
        f"{metrics.num_new_tokens} tokens in {metrics.num_steps} steps ({end.finish_reason})",
        f"MAT {show(metrics.mat, '')}",
        show(metrics.tok_s, " tok/s", 1),
        f"TTFT {show(metrics.ttft_s, ' s')}",
    ]
    return " · ".join(parts) + (f" · run {run_id}" if run_id else "")


def _open_trace(path: Path) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--trace: {path} cannot be written: {error.strerror}.") from error


def _prompt(
    options: GenerateOptions, target: Target
) -> tuple[list[dict[str, str]], str, list[int]]:
    """Chat turns (empty for raw), the prompt's text, and its token ids."""
    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise PromptError("Give either a prompt or --prompt-ids, not both.")
        return [], "", _read_ids(options.prompt_ids)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if text is None or not text.strip():
        raise PromptError("The prompt is empty. Write one, or give --prompt-ids 1,2,3.")
    if options.raw or not target.has_chat_template:
        return [], text, target.encode(text)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": text})
    return messages, text, target.encode_chat(messages)


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(" ", "").strip(",").split(",")]
    except ValueError as error:
        raise PromptError(f"--prompt-ids must be like 1,2,3, got {text!r:.80}.") from error


_last_message = threading.local()


def _progress(message: str, fraction: float | None) -> None:
    if getattr(_last_message, "text", None) != message:
        _last_message.text = message
        typer.echo(message + " …" if fraction != 1.0 else message, err=True)


def run_models(*, as_json: bool) -> None:
    """Print the target presets."""
    with _errors_as_sentences():
        specs = presets.targets()
    if as_json:
        typer.echo(json.dumps([s.model_dump(mode="json") for s in specs.values()], indent=2))
        return
    for spec in specs.values():
        where = spec.hub or spec.path or (spec.wheel and f"wheel {spec.wheel.package}")
        typer.echo(f"{spec.name:26}{spec.title}  [{where}]\n{'':26}{spec.description.strip()}")
    typer.echo("\nAny local folder, .gguf file or hub id works too: --target PATH_OR_ID")


def run_methods(*, as_json: bool) -> None:
    """Print the methods with their settings, and the presets."""
    with _errors_as_sentences():
        named = presets.methods()
        types = decoding_types()
    if as_json:
        schema = {name: cls.model_json_schema() for name, cls in types.items()}
        shown = {name: preset.model_dump(mode="json") for name, preset in named.items()}
        typer.echo(json.dumps({"decoding_types": schema, "presets": shown}, indent=2))
        return
    for name, cls in types.items():
        typer.echo(f"{name:16}{cls.summary}" + (f"  ({cls.paper})" if cls.paper else ""))
        for key, field in cls.model_fields.items():
            if key != "decoding_type":
                default = json.dumps(field.get_default(), default=str)
                short = default if len(default) <= 24 else default[:21] + "..."
                typer.echo(f"{'':4}{key:32}{short:26}{field.description or ''}")
    typer.echo("\nPresets:")
    for preset in named.values():
        belongs = f" for {preset.target}" if preset.target else ""
        typer.echo(f"  {preset.name:24}{preset.title}{belongs}")
