"""`specdec generate`: streams the answer to one prompt, with a trace and a log entry."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import typer

import presets
from engine.drafters.method import MethodConfig
from engine.errors import ConfigError, PromptError
from engine.formats import plural
from engine.model.target import Target
from engine.safe_text import json_text
from playground.cli.commands import GenerateOptions
from playground.cli.inputs import limits_of, log_url, sampling_of
from playground.cli.loading import loaded_models, method_of
from playground.cli.streams import (
    EXIT_INTERRUPTED,
    as_output,
    note,
    read_stdin,
    until_interrupt,
    write_files,
    write_output,
)
from playground.host.live import LiveRun
from playground.host.recording import Prompt, decode_and_record
from playground.host.result import bypass_sentence, drafting_sentence, figure_texts, remarks
from playground.host.trace import jsonl_trace
from storage import RunDetail, RunLog, StoredRun


def generate(options: GenerateOptions) -> None:
    """Generate from one prompt and print the text as it is decoded."""
    printed: list[str] = []
    stored = _decode(options, printed)
    if options.as_json:
        write_output(_json(stored.run, is_saved=options.save), None)
    else:
        _print_rest(stored.run, printed, is_saved=options.save)
    if options.trace:
        write_files(options.trace.parent, {options.trace.name: jsonl_trace(stored)})
    if stored.run.status == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)


def _decode(options: GenerateOptions, printed: list[str]) -> StoredRun:
    """The run, which Ctrl+C ends early; `printed` gets the pieces of text that were streamed."""
    stops = {"stop": tuple(options.stop), "stop_token_ids": tuple(options.stop_token_id)}
    config, sampling = _method(options), sampling_of(options)
    limits = limits_of(options, **stops)
    # A stop string is left out of the text, so that what is decoded may not belong to it.
    run, streams = LiveRun(owner=""), not options.as_json and not limits.stop
    if options.trace:  # a file that cannot be written is refused before the run
        write_files(options.trace.parent, {options.trace.name: ""})
    with ExitStack() as stack:
        spec = presets.resolve(options.target)
        models = stack.enter_context(loaded_models(options, spec, options.dtype))
        target, drafter = models.build_context().target, models.drafter(config)
        for remark in (*target.notes, *drafter.notes):
            note(remark)
        prompt = _prompt(options, target, sampling.chat_template_kwargs)
        log = stack.enter_context(RunLog.open(log_url(options) if options.save else None))
        stopped = stack.enter_context(until_interrupt())
        decode_and_record(
            log,
            target,
            drafter,
            config,
            prompt,
            sampling=sampling,
            limits=limits,
            cancelled=stopped,
            each=lambda _: _print_new(run, printed) if streams else None,
            run=run,
        )
        stored = log.read_whole(run.log_id or "")
    assert stored is not None
    return stored


def _method(options: GenerateOptions) -> MethodConfig:
    """As `method_of`; notes that a preset is made for another target, before loading."""
    preset = presets.methods().get(options.method)
    own = preset and preset.target
    if own and own not in presets.same_model(presets.resolve(options.target)):
        note(f"note: {options.method} is made for another target: --target {own}.")
    config = method_of(options)
    # A trace shows what a method drafts, on any machine the same.
    is_set = any(setting.startswith("drafting=") for setting in options.settings)
    return config if is_set or options.trace is None else config.replace(drafting="as set")


def _print_new(run: LiveRun, printed: list[str]) -> None:
    """Print the pieces of text since the last call, and add them to `printed`."""
    if new := run.pieces(len(printed)):
        printed += new
        sys.stdout.write(as_output("".join(new)))
        sys.stdout.flush()


def _json(run: RunDetail, *, is_saved: bool) -> str:
    """A finished run as one JSON object."""
    names = "target method lossless text finish_reason metrics output_ids".split()
    values = {name: getattr(run, name) for name in names}
    return json_text({"run_id": run.id if is_saved else None, **values}, indent=2) + "\n"


def _print_rest(run: RunDetail, printed: Sequence[str], *, is_saved: bool) -> None:
    """Print the text after the pieces that were printed, and the figures."""
    write_output(run.text.removeprefix("".join(printed)) + "\n", None)
    note(_figures(run) + (f" · run {run.id}" if is_saved else ""))
    for sentence in (bypass_sentence, drafting_sentence):
        if words := sentence(run.metrics):
            note(words)


def _figures(run: RunDetail) -> str:
    texts, tokens = figure_texts(run.metrics), plural(run.num_new_tokens, "token")
    figures = [
        f"{run.method_title}{'' if run.lossless else ' (lossy)'}",
        f"{tokens} in {plural(run.num_steps, 'step')} ({run.finish_reason})",
        *remarks(run.metrics),
        f"MAT {texts['mat']}",
        f"{texts['tok_s']} tok/s",
        f"TTFT {texts['ttft_s']}",
    ]
    return " · ".join(figures)


def _prompt(options: GenerateOptions, target: Target, template: Mapping[str, Any]) -> Prompt:
    """Raises PromptError, ConfigError: the prompt is missing, or its ids are malformed."""
    if options.prompt_ids is not None:
        if options.prompt is not None:
            raise PromptError("Give either a prompt or --prompt-ids, not both.")
        try:
            ids = tuple(int(part) for part in options.prompt_ids.strip(", ").split(","))
        except ValueError as error:
            like = f"1,2,3, got {options.prompt_ids!r:.80}"
            raise ConfigError(f"--prompt-ids must be like {like}.") from error
        return Prompt("", (), ids)
    text = read_stdin() if options.prompt == "-" else options.prompt
    if text is None or not text.strip():
        raise PromptError("The prompt is empty. Write one, or give --prompt-ids 1,2,3.")
    if options.raw or not target.has_chat_template:
        return Prompt.encode(target, text, (), template)
    system = [{"role": "system", "content": options.system}] if options.system else []
    return Prompt.encode(target, text, [*system, {"role": "user", "content": text}], template)
