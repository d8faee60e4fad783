"""`app.py generate`: one prompt, its text as it comes; the trace and the log on the way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from playground.cli.options import (
    LogOptions,
    MethodOptions,
    SamplingOptions,
    TargetOptions,
    takes,
)

if TYPE_CHECKING:
    from engine.drafters.method import MethodConfig
    from engine.metrics import Metrics
    from engine.model.target import Target
    from engine.steps import End, Record


@dataclass(kw_only=True)
class GenerateOptions(LogOptions, SamplingOptions, MethodOptions, TargetOptions):
    """Options of `generate`."""

    method: Annotated[str, typer.Option(help="Method: preset, FILE.yaml or decoding type.")] = (
        "Autoregressive"
    )
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None
    prompt_ids: Annotated[
        str | None, typer.Option(help="The prompt as token ids: 1,2,3.", metavar="IDS")
    ] = None
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False
    system: Annotated[str | None, typer.Option(help="System prompt of the chat.")] = None
    stop: Annotated[
        list[str], typer.Option(help="End the text at this string (left out of it).")
    ] = field(default_factory=list)
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False
    trace: Annotated[
        Path | None, typer.Option(help="Write every step to this file.", metavar="FILE.jsonl")
    ] = None
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the run in the run log.")] = (
        True
    )


@takes(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate from one prompt and print the text as it comes."""
    import presets
    from engine.decode import decode
    from playground.host.methods import choose_method
    from playground.host.models import Models
    from playground.host.recording import record_run
    from playground.host.trace import TraceFile
    from storage import RunLog

    config = choose_method(options.method, options.settings, options.drafter)
    sampling, limits = options.sampling, options.limits(stop=tuple(options.stop))
    with ExitStack() as stack:
        models = Models(cache_dir=options.cache, device=options.device, resolve=presets.resolve)
        stack.callback(models.close)
        target = models.target(presets.resolve(options.target), options.dtype, _Progress())
        drafter = models.drafter(config)
        messages, prompt_text, prompt_ids = _prompt(options, target)
        log = RunLog.open(options.log_url if options.save else None)
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
        trace = None
        if options.trace is not None:
            trace = stack.enter_context(
                TraceFile(options.trace, target, config, prompt_ids, sampling, limits.stop)
            )
        output = _Output(target, limits.stop, stream=not options.as_json and not limits.stop)
        for record in decode(target, drafter, prompt_ids, sampling=sampling, limits=limits):
            recording.put(record)
            output.take(record)
            if trace is not None:
                trace.write(record)
    output.finish(config, recording.run_id if options.save else None, options.as_json)


class _Output:
    """Prints the text as it comes, or one JSON object at the end."""

    def __init__(self, target: Target, stop: Sequence[str], *, stream: bool) -> None:
        from engine.metrics import Tally
        from engine.model.text import Detokenizer

        self._target = target
        self._stop = stop
        self._stream = stream
        self._tally = Tally()
        self._pieces = Detokenizer(target.tokenizer)
        self._end: End | None = None

    def take(self, record: Record) -> None:
        from engine.steps import End, Prefill

        self._tally.add(record)
        if isinstance(record, End):
            self._end = record
        elif isinstance(record, Prefill):
            self._print([record.token_id])
        else:
            self._print(record.committed[: record.num_committed])

    def _print(self, token_ids: Sequence[int]) -> None:
        if self._stream:
            sys.stdout.write("".join(self._pieces.push(token_id) for token_id in token_ids))
            sys.stdout.flush()

    def finish(self, config: MethodConfig, run_id: str | None, as_json: bool) -> None:
        import json
        from dataclasses import asdict

        from engine.model.text import whole_text

        assert self._end is not None
        metrics = self._tally.metrics
        text = whole_text(self._target.tokenizer, self._end.output_ids, self._stop)
        if as_json:
            summary = {
                "run_id": run_id,
                "target": self._target.name,
                "method": config.model_dump(mode="json"),
                "lossless": config.lossless,
                "text": text,
                "output_ids": list(self._end.output_ids),
                "finish_reason": self._end.finish_reason,
                "metrics": asdict(metrics),
            }
            typer.echo(json.dumps(summary, ensure_ascii=False, indent=2))
            return
        typer.echo(self._pieces.flush() if self._stream else text)
        typer.echo(_figures(config, metrics, self._end, run_id), err=True)


def _figures(config: MethodConfig, metrics: Metrics, end: End, run_id: str | None) -> str:
    def show(value: float | None, unit: str, digits: int = 2) -> str:
        return "–" if value is None else f"{value:.{digits}f}{unit}"

    figures = [
        f"{type(config).title}{'' if config.lossless else ' (lossy)'}",
        f"{metrics.num_new_tokens} tokens in {metrics.num_steps} steps ({end.finish_reason})",
        f"MAT {show(metrics.mat, '')}",
        show(metrics.tok_s, " tok/s", 1),
        f"TTFT {show(metrics.ttft_s, ' s')}",
    ]
    return " · ".join(figures) + (f" · run {run_id}" if run_id else "")


def _prompt(
    options: GenerateOptions, target: Target
) -> tuple[list[dict[str, str]], str, list[int]]:
    """Chat turns (empty for raw), the prompt's text, and its token ids."""
    from engine.errors import PromptError

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
    from engine.errors import PromptError

    try:
        return [int(part) for part in text.replace(" ", "").strip(",").split(",")]
    except ValueError as error:
        raise PromptError(f"--prompt-ids must be like 1,2,3, got {text!r:.80}.") from error


class _Progress:
    """Tells on stderr what loading does; a message that only moves on is told once."""

    def __init__(self) -> None:
        self._last: str | None = None

    def __call__(self, message: str, fraction: float | None) -> Any:
        if message != self._last:
            self._last = message
            typer.echo(message if fraction == 1.0 else f"{message} …", err=True)
