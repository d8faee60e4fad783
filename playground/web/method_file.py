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
from playground.errors import Fault
from playground.host.methods import read_method
from playground.web.fields import without_links
from playground.web.forms import QUEUED, RAW, Updates
from playground.web.results import show_fault_in

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
                info="",
                elem_classes=["pg-field", "pg-field-method_file"],
            )
            self._open = gr.UploadButton("Open file", size="sm", elem_id="pg-method-file-open")

    def listen(
        self, target: gr.Dropdown, fill: Callable[[Any, MethodConfig], Any], outputs: Sequence[Any]
    ) -> None:
        """Read the box whenever it changes.

        Args:
            fill: returns values of `outputs` for the picked target and a method's settings.
        """

        @show_fault_in(self._text, where="reading a method file", render=_remark)
        def read(text: Any, picked: Any) -> Updates:
            if not isinstance(text, str) or not text.strip():
                return {self._text: _remark("")}
            config, remarks = read_method(text)
            summary = f"Read as {type(config).title}; its settings are in the form below."
            summary = " ".join([summary, *(remark.removeprefix("note: ") for remark in remarks)])
            updates = dict(zip(outputs, fill(picked, config), strict=True))
            return {self._text: _remark(summary), **updates}

        @show_fault_in(self._text, where="opening a file", render=_remark)
        def read_file(path: Any) -> Updates:
            return {self._text: uploaded_text(path)}

        self._open.upload(read_file, self._open, self._text, **QUEUED)
        self._text.change(read, [self._text, target], [self._text, *outputs], **RAW)


def uploaded_text(path: object) -> str:
    """The text of an uploaded file. Raises ConfigError, naming it without its temporary folder."""
    if not isinstance(path, str):
        raise ConfigError("Open a file.")
    return read_text(Path(path), most=MAX_CHARS, what=Path(path).name)


def _remark(remark: str | Fault) -> Any:
    """An update of the text under the box."""
    faulty = isinstance(remark, Fault)
    text = remark.sentence if isinstance(remark, Fault) else remark
    classes = ["pg-field", "pg-field-method_file", *["faulty"] * faulty]
    return gr.update(info=without_links(text), elem_classes=classes)
