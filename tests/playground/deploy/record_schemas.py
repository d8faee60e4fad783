"""Records what releases of vLLM and SGLang accept, from their own sources, for the tests.

    python -m tests.playground.deploy.record_schemas vllm 0.33=vllm/config/speculative.py …
    python -m tests.playground.deploy.record_schemas sglang 0.5.23=sglang/srt/server_args.py …

Each argument is RELEASE=FILE: a version as exports offer it, and a source file of that release;
nothing of it is run. The JSON goes to standard output: per release the names of the settings with
their types and choices.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ENGINE_ONLY = {"target_model_config", "target_parallel_config", "draft_model_config",
               "draft_parallel_config", "enable_chunked_prefill", "disable_log_stats"}  # fmt: skip
"""Fields of vLLM's class that the engine fills in itself."""


def vllm_fields(source: str) -> dict[str, Any]:
    """Fields of SpeculativeConfig; choices where the type is a Literal."""
    tree = ast.parse(source)
    aliases = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SpeculativeConfig")
    found = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.target.id not in ENGINE_ONLY:
                found[node.target.id] = _type(node.annotation, aliases)
    return found


def _type(node: ast.expr, aliases: dict[str, ast.expr]) -> Any:
    """`int`, `float`, `bool`, `str`, a list of choices, or `any`."""
    text = ast.unparse(node).replace("Optional[", "").replace("SkipValidation[", "").rstrip("]")
    name = text.split(" |")[0].strip()
    if name in aliases:
        return _choices(aliases[name], aliases)
    return name if name in ("int", "float", "bool", "str") else "any"


def _choices(node: ast.expr, aliases: dict[str, ast.expr]) -> list[str]:
    found: list[str] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found.append(part.value)
        elif isinstance(part, ast.Name) and part.id in aliases:
            found += _choices(aliases[part.id], aliases)
    return sorted(set(found))


def sglang_flags(source: str) -> dict[str, Any]:
    """Every --speculative-* flag, from the fields of ServerArgs."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = ast.unparse(node.annotation)
        is_flag = node.target.id.startswith("speculative") and text.startswith("A[")
        if is_flag and "no_cli=True" not in text:
            inner = text[2:].split(",")[0].removeprefix("Optional[").rstrip("]")
            kinds = {"bool": "switch", "int": "int", "float": "float"}
            flag = "--" + node.target.id.replace("_", "-")
            found[flag] = kinds.get(inner, "str")
            if "aliases=['--" in text:
                found["--" + text.split("aliases=['--")[1].split("'")[0]] = found[flag]
    return dict(sorted(found.items()))


def main() -> None:
    which, *pairs = sys.argv[1:]
    read = {"vllm": vllm_fields, "sglang": sglang_flags}[which]
    recorded = {}
    for pair in pairs:
        release, _, file = pair.partition("=")
        recorded[release] = read(Path(file).read_text(encoding="utf-8"))
    lists = re.compile(r"\[\s*([^\[\]]*?)\s*\]")  # each on a line of its own
    text = json.dumps(recorded, indent=1)
    print(lists.sub(lambda items: f"[{' '.join(items[1].split())}]", text))


if __name__ == "__main__":
    main()
