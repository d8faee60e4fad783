"""Records a decode loop on another thread: text, figures and the run log, in batches.

The loop only puts its records into a queue. Twenty times a second, the recording takes the new
ones, turns tokens into text, writes all to the log, and only then publishes it to the live run:
whatever was shown is in the log, even if the process is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from queue import Empty, SimpleQueue
from typing import Any, Literal

from engine.config import Limits, Sampling
from engine.decode import decode
from engine.drafters.base import Drafter
from engine.drafters.method import MethodConfig
from engine.errors import PlaygroundError, PromptError
from engine.metrics import Tally
from engine.model.labels import TokenLabels
from engine.model.target import NO_SETTINGS, Target
from engine.model.text import Detokenizer, whole_text
from engine.steps import End, Prefill, Record, Step
from playground.errors import Fault, attempt
from playground.host.environment import environment, machine
from playground.host.live import Finish, FirstToken, LiveRun, Message
from playground.host.request import GenerateRequest
from storage import BusyError, NewRun, RequestKey, RunLog, StepRow, StorageError, key_values

BATCH_S = 0.05
MAX_QUEUED = 5000
"""Steps kept in memory while the log is out of reach; with trees of 64 nodes some 50 MB."""
NO_REQUEST = RequestKey()
_STEP_FIELDS = [field.name for field in fields(Step)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its tokens: the last message of a conversation, or a text to continue.

    Attributes:
        messages: the whole conversation; empty for a text.
    """

    text: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def encode(
        cls,
        target: Target,
        text: str,
        messages: Sequence[Message] = (),
        template: Mapping[str, Any] = NO_SETTINGS,
    ) -> Prompt:
        """A conversation rendered by the chat template, with its settings; else the text.

        Raises PromptError: the chat template is missing, or refuses the messages or a setting.
        """
        if messages:
            return cls(text, tuple(messages), tuple(target.encode_chat(messages, template)))
        if template:
            raise PromptError(
                f"A text to continue has no chat template: leave out {', '.join(template)}."
            )
        return cls(text, (), tuple(target.encode(text)))


class Recording:
    """Records a run that the log already has, as long as its context lasts.

    An exception ends the run as failed, Ctrl+C as cancelled.

    Raises StorageError: at the end, the log could not be written.
    """

    def __init__(self, log: RunLog, run: LiveRun, target: Target, limits: Limits) -> None:
        self.fault: Fault | None = None
        """An error of the recording itself, for example that the log cannot be written."""
        self._log = log
        assert run.log_id is not None
        self._run, self._run_id = run, run.log_id
        self._limits = limits
        self._tokenizer = target.tokenizer
        self._pieces = Detokenizer(self._tokenizer, hidden=limits.stop_token_ids)
        self._labels = TokenLabels(self._tokenizer)
        self._tally = Tally()
        self._output_ids: list[int] = []
        self._end: End | None = None
        self._inbox: SimpleQueue[Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._attempt, args=(self._follow,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all records are written, then write how the run ended."""
        fault = None
        if error is not None and not isinstance(error, KeyboardInterrupt):
            expected = isinstance(error, PlaygroundError)
            fault = Fault(str(error) if expected else "The run ended early.", expected)
        self._inbox.put(None)
        self._thread.join()
        self._attempt(lambda: self._finish(self.fault or fault))
        if error is None and self.fault is not None:
            is_busy = issubclass(self.fault.kind, BusyError)
            raise (BusyError if is_busy else StorageError)(self.fault.sentence)

    def put(self, record: Record) -> None:
        """Queue a record; never blocks. Too many that wait for an unreachable log end the run."""
        self._inbox.put(record)
        if not self._log.out_of_reach:
            return
        self._run.activity = "waiting for the run log, which cannot be reached"
        if self._inbox.qsize() > MAX_QUEUED and self.fault is None:
            sentence = f"The run log was unreachable for {MAX_QUEUED} steps, so the run ended."
            self.fault = Fault(sentence, expected=True)

    def _attempt(self, work: Callable[[], None]) -> None:
        fault = attempt(work, where=f"the recording of run {self._run.id}")
        self.fault = self.fault or fault

    def _finish(self, fault: Fault | None) -> None:
        reason = "cancelled" if self._end is None else self._end.finish_reason
        text = whole_text(self._tokenizer, self._output_ids, self._limits)
        plain = self._run.plain
        status: Literal["completed", "cancelled", "failed"]
        status = "failed" if fault else "cancelled" if reason == "cancelled" else "completed"
        self._log.finish(
            self._run_id,
            status=status,
            output_ids=self._output_ids,
            text=text,
            finish_reason=None if fault else reason,
            metrics=asdict(self._tally.metrics) | ({"plain": asdict(plain)} if plain else {}),
            error=fault.sentence if fault else None,
        )
        self._run.metrics = self._tally.metrics
        self._run.finish = Finish(None if fault else reason, text)

    # ---- on the recording's own thread

    def _follow(self) -> None:
        """Take records until None, the end of the queue."""
        while True:
            batch = [self._inbox.get()]
            time.sleep(0.0 if isinstance(batch[0], Prefill) else BATCH_S)
            try:
                while True:
                    batch.append(self._inbox.get_nowait())
            except Empty:
                pass
            self._handle([record for record in batch if record is not None])
            if None in batch:
                return

    def _handle(self, records: Sequence[Record]) -> None:
        rows: list[StepRow] = []
        for record in records:
            self._tally.add(record)
            if isinstance(record, Prefill):
                self._begin(record)
            elif isinstance(record, Step):
                rows.append(self._row(record))
            else:
                self._end = record
        metrics = self._tally.metrics
        if rows:
            self._log.add_steps(self._run_id, rows, asdict(metrics))
            self._run.rows.extend(rows)
            self._run.activity = f"generating · {rows[-1].decision}".removesuffix(" · ")
        self._run.metrics = metrics

    def _begin(self, prefill: Prefill) -> None:
        token, text = prefill.token_id, self._pieces.push(prefill.token_id)
        self._output_ids.append(token)
        num_prompt_tokens, ttft_s = prefill.num_prompt_tokens, prefill.ttft_s
        self._log.add_prefill(
            self._run_id,
            token_id=token,
            text=text,
            num_prompt_tokens=num_prompt_tokens,
            ttft_s=ttft_s,
        )
        self._run.first = FirstToken(text, ttft_s)
        self._run.state, self._run.activity = "running", "generating"

    def _row(self, step: Step) -> StepRow:
        token_ids = step.committed[: step.num_committed]
        *token_texts, bonus_text = self._labels.of_step(step, self._output_ids)
        self._output_ids.extend(token_ids)
        return StepRow(
            **{name: getattr(step, name) for name in _STEP_FIELDS},
            token_texts=tuple(token_texts),
            bonus_text=bonus_text,
            committed_texts=tuple(self._pieces.push(token) for token in token_ids),
        )


def decode_and_record(
    log: RunLog,
    target: Target,
    drafter: Drafter,
    config: MethodConfig,
    prompt: Prompt,
    *,
    sampling: Sampling,
    limits: Limits,
    cancelled: Callable[[], bool],
    run: LiveRun,
    title: str = "",
    labels: Mapping[str, str] = {},
    request: RequestKey = NO_REQUEST,
    before: Callable[[], None] = lambda: None,
    prefilled: Callable[[int], None] = lambda num_tokens: None,
    each: Callable[[Record], None] = lambda record: None,
    prefix_caching: bool = False,
    undisturbed: bool = False,
) -> None:
    """Decode one prompt, and record the run in the log and in `run`.

    Args:
        title: of the method; by default that of its class.
        request: of an experiment; by default the run is one of its own.
        before: called once the run is in the log, before its prefill.
        prefilled: called with the number of prompt tokens in the cache so far.
        each: called with every record after it was queued.
        undisturbed: queue the records after the last step, so that nothing but the loop runs.

    Raises StorageError: the log cannot be written.
    """
    new = NewRun(
        target=target.name,
        method_title=title or type(config).title,
        **key_values(request),
        labels=labels,
        **_settings(config, sampling, limits),
        prompt_ids=prompt.token_ids,
        prompt_text=prompt.text,
        messages=prompt.messages,
        dtype=target.dtype_name,
        device=str(target.device),
        environment=environment(target),
    )
    run.log_id = log.begin(new)
    with Recording(log, run, target, limits) as recording:
        before()
        records: Iterable[Record] = decode(
            target,
            drafter,
            prompt.token_ids,
            sampling=sampling,
            limits=limits,
            cancelled=lambda: cancelled() or recording.fault is not None,
            prefilled=prefilled,
            prefix_caching=prefix_caching,
        )
        for record in list(records) if undisturbed else records:
            recording.put(record)
            each(record)


def log_failed_start(log: RunLog, run: LiveRun, request: GenerateRequest, sentence: str) -> None:
    """Write a run to the log whose target or drafter could not be loaded, and why."""
    new = NewRun(
        target=request.target.name,
        method_title=request.title,
        **_settings(request.config, request.sampling, request.limits),
        prompt_ids=request.prompt_ids,
        prompt_text=run.meta["prompt"],
        messages=tuple(run.messages),
        dtype=request.dtype,
        environment=machine(),
    )
    run.log_id = log.begin(new)
    nothing: dict[str, Any] = {"output_ids": (), "text": "", "finish_reason": None, "metrics": {}}
    log.finish(run.log_id, status="failed", error=sentence, **nothing)


def _settings(config: MethodConfig, sampling: Sampling, limits: Limits) -> dict[str, Any]:
    return {
        "method": config.model_dump(mode="json"),
        "lossless": config.lossless,
        "sampling": sampling.model_dump(mode="json"),
        "limits": limits.model_dump(mode="json"),
    }
