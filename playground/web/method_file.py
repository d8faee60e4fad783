"""A method's settings from a file of an engine or of the playground."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from engine.drafters.method import MethodConfig
from engine.errors import ConfigError
from engine.interop.export_files import MAX_CHARS
from engine.safe_text import read_text
from playground.errors import Fault, attempt
from playground.host.methods import read_method
from playground.web.fields import unlinked
from playground.web.forms import QUEUED, RAW

SAMPLE = """speculative_config:
  decoding_type: NGram
  max_draft_len: 4"""


class MethodFile:
    """A text box under the method picker; the file pasted or opened there fills the form."""

    def __init__(self) -> None:
        with gr.Accordion(
            "Read a method file …", open=False, elem_id="pg-method-file", elem_classes="pg-group"
        ):
            self._text = gr.Textbox(
                label="speculative_config of TensorRT-LLM or vLLM, or a method file of this page",
                lines=4,
                max_lines=12,
                placeholder=SAMPLE,
                elem_id="pg-method-file-text",
                **_about(""),
            )
            self._open = gr.UploadButton("Open file", size="sm", elem_id="pg-method-file-open")

    def listen(
        self, target: gr.Dropdown, take: Callable[[Any, MethodConfig], Any], outputs: Sequence[Any]
    ) -> None:
        """Read the box whenever it changes.

        Args:
            take: values of `outputs` for the picked target and a method's settings.
        """

        def read(text: Any, picked: Any) -> list[Any]:
            nothing = [gr.skip() for _ in outputs]
            if not isinstance(text, str) or not text.strip():
                return [gr.Textbox(**_about("")), *nothing]
            updates = attempt(lambda: self._read(text, picked, take), where="reading a method file")
            if isinstance(updates, Fault):
                return [gr.Textbox(**_about(updates)), *nothing]
            return updates

        def read_file(path: Any) -> Any:
            text = attempt(lambda: uploaded_text(path), where="opening a file")
            return gr.Textbox(**_about(text)) if isinstance(text, Fault) else text

        self._open.upload(read_file, self._open, self._text, **QUEUED)
        self._text.change(read, [self._text, target], [self._text, *outputs], **RAW)

    @staticmethod
    def _read(text: str, picked: Any, take: Callable[[Any, MethodConfig], Any]) -> list[Any]:
        config, remarks = read_method(text, where="the file")
        summary = f"Read as {type(config).title}; its settings are in the form below."
        text = " ".join([summary, *(remark.removeprefix("note: ") for remark in remarks)])
        return [gr.Textbox(**_about(text)), *take(picked, config)]


def uploaded_text(path: object) -> str:
    """Raises ConfigError: it is no text; names the file without its temporary folder."""
    if not isinstance(path, str):
        raise ConfigError("Open a file.")
    return read_text(Path(path), most=MAX_CHARS, what=Path(path).name)


def _about(remark: str | Fault) -> dict[str, Any]:
    """The text under the box, as under a setting."""
    faulty = isinstance(remark, Fault)
    text = remark.sentence if isinstance(remark, Fault) else remark
    classes = ["pg-field", "pg-field-method_file", *["faulty"] * faulty]
    return {"info": unlinked(text), "elem_classes": classes}
