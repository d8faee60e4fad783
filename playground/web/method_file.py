"""A method's settings from a file, as an engine or this program writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from engine.drafters.method import MethodConfig
from engine.interop.handoff import MAX_CHARS
from engine.plain import read_text
from playground.errors import Fault, attempt
from playground.host.methods import read_method
from playground.web.forms import RAW
from playground.web.results import saying

SAMPLE = """speculative_config:
  decoding_type: NGram
  max_draft_len: 4"""


class MethodFile:
    """A box under the method picker; what is pasted or opened there fills the form."""

    def __init__(self) -> None:
        with gr.Accordion("Read a method file …", open=False, elem_id="pg-method-file"):
            self._text = gr.Textbox(
                label="speculative_config of TensorRT-LLM or vLLM, or a method file of this page",
                lines=4,
                max_lines=12,
                placeholder=SAMPLE,
                elem_id="pg-method-file-text",
            )
            self._open = gr.UploadButton("Open file", size="sm", elem_id="pg-method-file-open")
            self._said = gr.HTML(elem_id="pg-method-file-said")

    def listen(
        self, target: gr.Dropdown, take: Callable[[Any, MethodConfig], Any], filled: Sequence[Any]
    ) -> None:
        """Read what the box holds whenever it changes.

        Args:
            take: values of `filled` for the picked target and a method's settings.
        """

        def read(text: Any, picked: Any) -> list[Any]:
            nothing = [gr.skip() for _ in filled]
            if not isinstance(text, str) or not text.strip():
                return ["", *nothing]
            found = attempt(lambda: self._read(text, picked, take), where="reading a method file")
            return [saying(found), *nothing] if isinstance(found, Fault) else found

        def opened(path: Any) -> tuple[Any, Any]:
            text = attempt(lambda: read_text(Path(path), most=MAX_CHARS), where="opening a file")
            return (gr.skip(), saying(text)) if isinstance(text, Fault) else (text, gr.skip())

        self._open.upload(
            opened,
            self._open,
            [self._text, self._said],
            show_progress="hidden",
            api_visibility="private",
        )
        self._text.change(read, [self._text, target], [self._said, *filled], **RAW)

    @staticmethod
    def _read(text: str, picked: Any, take: Callable[[Any, MethodConfig], Any]) -> list[Any]:
        config = read_method(text, where="the file")
        said = saying(f"Read as {type(config).title}; its settings are in the form below.")
        return [said, *take(picked, config)]
