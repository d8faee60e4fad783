"""`app.py generate`: streams the answer to one prompt, with a trace and a log entry."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from engine.formats import plural
from engine.safe_text import json_text
from playground.cli.options import (
    METHOD_HELP,
    LogOptions,
    MethodOptions,
    SamplingOptions,
    TargetOptions,
    argument,
    command,
    option,
)
from playground.cli.streams import (
    EXIT_INTERRUPTED,
    as_output,
    note,
    read_stdin,
    until_interrupt,
    write_files,
    write_output,
)

if TYPE_CHECKING:
    from engine.drafters.method import MethodConfig
    from engine.metrics import Metrics
    from engine.model.target import Target
    from engine.steps import Record
    from playground.host.live import LiveRun


@dataclass(kw_only=True)
class GenerateOptions(LogOptions, SamplingOptions, MethodOptions, TargetOptions):
    method: str = option("Autoregressive", METHOD_HELP)
    prompt: str | None = argument(None, "The prompt; - reads it from stdin.")
    prompt_ids: str | None = option(None, "The prompt as token ids: 1,2,3.", metavar="IDS")
    raw: bool = option(False, "Continue the prompt as it is, without a chat template.", "--raw")
    system: str | None = option(None, "System prompt of the chat.")
    stop: list[str] = option([], "End the text at this string, which is left out.")
    stop_token_id: list[int] = option([], "End the text at this token, which is left out.")
    as_json: bool = option(False, "Print one JSON object instead of the text.", "--json")
    trace: Path | None = option(
        None,
        "Write every step to this file; drafts are as set, unless --set drafting=auto.",
        metavar="FILE.jsonl",
    )
    save: bool = option(True, "Keep the run in the run log.", "--save/--no-save")

    def config(self) -> MethodConfig:
        """As `MethodOptions`; notes that a preset is made for another target, before loading."""
        import presets

        preset = presets.methods().get(self.method)
        own = preset and preset.target
        if own and own not in presets.same_model(presets.resolve(self.target)):
            note(f"note: {self.method} is made for another target: --target {own}.")
        config = MethodOptions.config(self)
        # A trace shows what a method drafts, on any machine the same.
        is_set = any(setting.startswith("drafting=") for setting in self.settings)
        return config if is_set or self.trace is None else config.replace(drafting="as set")


@command(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Generate from one prompt and print the text as it is decoded."""
    import presets
    from playground.host.live import LiveRun
    from playground.host.recording import decode_and_record
    from playground.host.trace import jsonl_trace
    from storage import RunLog

    config, sampling = options.config(), options.sampling
    stops = {"stop": tuple(options.stop), "stop_token_ids": tuple(options.stop_token_id)}
    limits = options.limits(**stops)
    streams = not options.as_json and not limits.stop
    run = LiveRun(owner="")
    if options.trace:  # a file that cannot be written is refused before the run
        write_files(options.trace.parent, {options.trace.name: ""})
    with ExitStack() as stack:
        spec = presets.resolve(options.target)
        models = stack.enter_context(options.models(spec, options.dtype))
        target, drafter = models.build_context().target, models.drafter(config)
        for remark in (*target.notes, *drafter.notes):
            note(remark)
        messages, prompt_text, prompt_ids = _prompt(options, target)
        log = stack.enter_context(RunLog.open(options.log_url if options.save else None))
        stopped = stack.enter_context(until_interrupt())
        output = _Output(run if streams else None)
        decode_and_record(
            log,
            target,
            drafter,
            config,
            prompt_ids,
            sampling=sampling,
            limits=limits,
            cancelled=stopped,
            each=output.add,
            prompt_text=prompt_text,
            messages=messages,
            run=run,
        )
        assert run.log_id is not None
        stored = log.read_whole(run.log_id) if options.trace else None
    if options.as_json:
        write_output(_json(options, target.name, config, run, output.token_ids), None)
    else:
        _print_rest(options, config, run, output.pieces)
    if options.trace and stored:
        write_files(options.trace.parent, {options.trace.name: jsonl_trace(stored)})
    if stopped():
        raise typer.Exit(EXIT_INTERRUPTED)


def _json(
    options: GenerateOptions,
    target: str,
    config: MethodConfig,
    run: LiveRun,
    token_ids: Sequence[int],
) -> str:
    """A finished run as one JSON object."""
    assert run.metrics is not None and run.finish is not None
    values = {
        "run_id": run.log_id if options.save else None,
        "target": target,
        "method": config.model_dump(mode="json"),
        "lossless": config.lossless,
        "text": run.finish.text,
        "finish_reason": run.finish.reason,
        "metrics": asdict(run.metrics),
        "output_ids": token_ids,
    }
    return json_text(values, indent=2) + "\n"


def _print_rest(
    options: GenerateOptions, config: MethodConfig, run: LiveRun, printed: Sequence[str]
) -> None:
    """Print the text after the pieces that were printed, and the figures."""
    from playground.host.result import bypass_sentence, drafting_sentence

    assert run.metrics is not None and run.finish is not None
    write_output(run.finish.text.removeprefix("".join(printed)) + "\n", None)
    run_id = run.log_id if options.save else None
    note(_figures(config, run.metrics, run.finish.reason, run_id))
    for sentence in (bypass_sentence, drafting_sentence):
        if words := sentence(asdict(run.metrics)):
            note(words)


class _Output:
    """Collects a run's token ids, and prints its text as it streams."""

    def __init__(self, streamed: LiveRun | None) -> None:
        self.token_ids: tuple[int, ...] = ()
        self.pieces: list[str] = []
        self._streamed = streamed

    def add(self, record: Record) -> None:
        """Process a record of the decode loop."""
        from engine.steps import End

        if isinstance(record, End):
            self.token_ids = record.output_ids
        if self._streamed is not None and (new := self._streamed.pieces(len(self.pieces))):
            self.pieces += new
            sys.stdout.write(as_output("".join(new)))
            sys.stdout.flush()


def _figures(
    config: MethodConfig, metrics: Metrics, finish_reason: str | None, run_id: str | None
) -> str:
    from playground.host.result import figure_texts, remarks

    texts, tokens = figure_texts(asdict(metrics)), plural(metrics.num_new_tokens, "token")
    figures = [
        f"{type(config).title}{'' if config.lossless else ' (lossy)'}",
        f"{tokens} in {plural(metrics.num_steps, 'step')} ({finish_reason})",
        *remarks(asdict(metrics)),
        f"MAT {texts['mat']}",
        f"{texts['tok_s']} tok/s",
        f"TTFT {texts['ttft_s']}",
    ]
    return " · ".join(figures) + (f" · run {run_id}" if run_id else "")


def _prompt(
    options: GenerateOptions, target: Target
) -> tuple[list[dict[str, str]], str, list[int]]:
    """Chat turns (empty for raw), the prompt's text, and its token ids."""
    from engine.errors import ConfigError, PromptError

    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise PromptError("Give either a prompt or --prompt-ids, not both.")
        try:
            return [], "", [int(part) for part in options.prompt_ids.strip(", ").split(",")]
        except ValueError as error:
            like = f"1,2,3, got {options.prompt_ids!r:.80}"
            raise ConfigError(f"--prompt-ids must be like {like}.") from error
    text = read_stdin() if options.prompt == "-" else options.prompt
    if text is None or not text.strip():
        raise PromptError("The prompt is empty. Write one, or give --prompt-ids 1,2,3.")
    if options.raw or not target.has_chat_template:
        return [], text, target.encode(text)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    messages.append({"role": "user", "content": text})
    return messages, text, target.encode_chat(messages)
