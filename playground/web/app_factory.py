"""Builds the page, and says how it is to be launched: local, private, ours in looks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from playground.host.runner import EngineHost
from playground.web.guard import middleware
from storage import RunLog

if TYPE_CHECKING:
    import gradio as gr

MAX_UPLOAD = "64mb"


def build(host: EngineHost, log: RunLog) -> gr.Blocks:
    """The whole page as Blocks; nothing is loaded and nothing is served yet."""
    from playground.web.shell import build_shell

    return build_shell(host, log)


def launch_options(host: str, allowed_hosts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of `Blocks.launch`: local, private, quiet, with our theme, styles and keys."""
    from playground.web.components import module_address, module_routes, static_text
    from playground.web.theme import theme

    address = json.dumps(module_address("page.js"))
    return {
        "server_name": host,
        "share": False,
        "quiet": True,
        "show_error": False,
        "run_history": False,
        "enable_monitoring": False,
        "footer_links": [],
        "max_file_size": MAX_UPLOAD,
        "state_session_capacity": 200,
        "ssr_mode": False,
        "app_kwargs": {
            "middleware": middleware(host, allowed_hosts),
            "routes": module_routes(),
            "openapi_url": None,
            "docs_url": None,
            "redoc_url": None,
        },
        "theme": theme(),
        "css": static_text("page.css", "compare_page.css", "runs/runs.css"),
        "js": f"() => {{ import(new URL({address}, document.baseURI)); }}",
    }
