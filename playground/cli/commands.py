"""The commands: their options, and where each is implemented."""

from __future__ import annotations

from pathlib import Path

import typer

from playground.cli.options import (
    METHOD_HELP,
    REQUIRED,
    CommandGroup,
    DeviceOptions,
    ExperimentOptions,
    FilterOptions,
    LogOptions,
    MethodOptions,
    SamplingOptions,
    TargetOptions,
    argument,
    command,
    option,
)
from playground.training import ABOUT

ENGINES = "trtllm, vllm, sglang, triton, llamacpp, transformers, mlx or ollama."

app = typer.Typer(
    cls=CommandGroup,
    name="specdec",
    help="See, tune and compare speculative decoding on your own machine.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)
runs = typer.Typer(
    name="runs",
    help="List, export, import, erase and copy the runs of the log.",
    no_args_is_help=True,
)
suites = typer.Typer(
    name="suites",
    help="List the sets of prompts, fetch public ones, write them for other benchmarks.",
    no_args_is_help=True,
)
app.add_typer(runs)
app.add_typer(suites)

# ---- servers


@command(app, "serve", "serve:serve")
class ServeOptions(LogOptions, DeviceOptions):
    """Serve the page."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(7860, "Port to listen on.", min=1, max=65535)
    allowed_host: list[str] = option(
        [], "Another host name by which the page may be reached.", metavar="NAME"
    )
    api_key: str = option(
        "",
        "Key for programs that call the endpoints; without it, none is needed on loopback.",
        envvar="PLAYGROUND_API_KEY",
    )
    no_token: bool = option(False, "Require no token; on loopback only.", "--no-token")
    drafter: list[str] = option(
        [], "Offer your own drafter on the page: module:Class.", metavar="M:C"
    )
    target: list[str] = option(
        [], "Offer another target on the page: local folder, .gguf file or hub id."
    )
    allow_path: list[str] = option(
        [], "Drafters and corpora that the page may name: folder, file or hub id.", metavar="PATH"
    )
    ray: list[str] = option(
        [], "Offer a Ray cluster to experiments, besides this machine.", metavar="ADDRESS"
    )


@command(app, "doctor", "lists:doctor")
class DoctorOptions(DeviceOptions):
    """Check how well this machine is set up for decoding."""


@command(app, "triton", "serve:triton")
class TritonOptions(LogOptions, DeviceOptions):
    """Serve the engine behind Triton, HTTP and gRPC (needs the extra triton)."""

    model: str = option("ensemble", "TARGET or TARGET:METHOD; default: the page's first choice.")
    host: str = option("127.0.0.1", "Address to listen on.")
    http_port: int = option(8000, "Port of HTTP.", min=1, max=65535)
    grpc_port: int = option(8001, "Port of gRPC.", min=1, max=65535)
    metrics_port: int = option(8002, "Port of Triton's own metrics.", min=1, max=65535)
    api_key: str = option(
        "",
        "Key for generation over HTTP and gRPC; without it, gRPC needs none on loopback.",
        envvar="PLAYGROUND_API_KEY",
    )
    no_token: bool = option(False, "Require no key over HTTP; on loopback only.", "--no-token")


# ---- one answer, and experiments


@command(app, "generate", "generate:generate")
class GenerateOptions(LogOptions, SamplingOptions, MethodOptions, TargetOptions):
    """Generate from one prompt and print the text as it is decoded."""

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


@command(app, "bench", "bench:bench")
class BenchOptions(ExperimentOptions):
    """Measure methods against plain decoding over suites of prompts, one request at a time."""

    methods: str | None = option(None, "Methods to measure, by name: ngram,suffix.", metavar="A,B")
    method: list[str] = option(
        [],
        "One more, with its own settings: 'NGram name=short max_draft_len=3'.",
        metavar="METHOD",
    )
    settings: list[str] = option(
        [], "Change a setting of every method.", "--set", metavar="FIELD=V"
    )
    max_new_tokens: int = option(128, "Maximum number of tokens per answer.")
    resume: str | None = option(None, "Resume a benchmark of the log.", metavar="ID")
    output: Path | None = option(
        None,
        "Write the report here: an HTML page, JSON, CSV tables and genai-perf's files.",
        metavar="DIR",
    )
    as_json: bool = option(False, "Print the report as JSON.", "--json")
    csv: Path | None = option(None, "Write the speedups as CSV here.", metavar="FILE.csv")
    save: bool = option(True, "Keep the runs in the run log.", "--save/--no-save")


@command(app, "sweep", "sweep:sweep")
class SweepOptions(ExperimentOptions, MethodOptions):
    """Measure many settings of one method and find the best, by search or grid."""

    method: str = option("", METHOD_HELP)
    vary: list[str] = option(
        [],
        "Setting to vary: f=1:16, f=1:16:3, f=1:64:log or f=a,b; repeatable.",
        metavar="FIELD=RANGE",
    )
    trials: int | None = option(
        None, "Number of combinations that the search measures; default 20.", min=1
    )
    grid: bool = option(False, "Measure all combinations.", "--grid")
    objective: str = option("speedup", "What to maximise: speedup or mat.")
    settings: list[str] = option(
        [], "Change a setting that is not varied.", "--set", metavar="FIELD=VALUE"
    )
    limit_per_category: int | None = option(
        1, "Maximum number of prompts of each kind of task.", min=1
    )
    max_new_tokens: int = option(64, "Maximum number of tokens per answer.")
    seed: int = option(0, "Seed of the search and of every random draw.")
    resume: str | None = option(None, "Resume a sweep of the log.", metavar="ID")
    output: Path | None = option(None, "Write the best settings here.", metavar="FILE.yaml")
    as_json: bool = option(False, "Print everything as JSON.", "--json")


@command(app, "connect", "connect:connect")
class ConnectOptions(LogOptions):
    """Watch a running engine's drafting, or measure it with and without."""

    url: str = argument(
        ..., "Address of a vLLM, SGLang, TensorRT-LLM, llama-server or playground server."
    )
    key: str = option("", "Its API key.", envvar="OPENAI_API_KEY")
    model: str = option("", "Model to use; default: the first that it lists.")
    plain: str = option("", "Address of the same model without speculation.", metavar="URL")
    replay: bool = option(False, "Send prompts instead of reading its counters.", "--replay")
    suite: str = option("tasks", "Prompts to send: a suite or a file.")
    prompts: int = option(12, "Number of prompts.", min=1, max=1000)
    concurrency: str = option("1,2,4,8,16", "Concurrency levels, run one after another.")
    max_new_tokens: int = option(128, "Maximum number of new tokens per answer.", min=1)
    seconds: float = option(300.0, "Maximum number of seconds per level.", min=1.0)
    every: float = option(2.0, "Seconds between two readings.", min=0.1)
    readings: int = option(0, "Number of readings; 0 = until Ctrl+C.", min=0)


@command(app, "train", "train:train")
class TrainOptions(TargetOptions, LogOptions):
    """Train a drafter for a target on texts that the target writes itself."""

    method: str = option(REQUIRED, "medusa, eagle, eagle3, redrafter or draft_target.")
    output: Path | None = option(
        None, "Folder of the drafter; a run there is resumed. Default: a new one on the Train page."
    )
    corpus: Path | None = option(
        None, "Folder of the target's texts; default: corpus, beside the output."
    )
    learn_from: str = option("shipped", f"{ABOUT['learn_from']} shipped, prompts or runs.")
    tokens: int | None = option(None, f"{ABOUT['tokens']} Default: 1,000,000.", min=1)
    minutes: float | None = option(None, ABOUT["minutes"], min=0.01)
    rows: int | None = option(
        None, "Texts written at a time; default 64, or 512 on CUDA, if they fit.", min=1
    )
    prompts: list[Path] = option(
        [], "Prompts in Spec-Bench's layout, besides those the target makes."
    )
    eval_prompts: list[Path] = option([], "Prompts to measure on, instead of held-out dialogues.")
    features: float = option(
        0.0,
        "GiB of disk, beside the corpus, for what the target shows of it: several "
        "drafters, and several epochs, then read it once.",
        min=0.0,
    )
    evals: int = option(1, "How many times acceptance is measured, evenly over the run.", min=1)
    settings: list[str] = option(
        [], "Change a setting of the training.", "--set", metavar="FIELD=VALUE"
    )
    grid: list[str] = option(
        [],
        "Train once with each of these values, in separate folders; repeatable.",
        metavar="FIELD=A,B",
    )
    seed: int = option(0, "Seed of corpus and training.")


# ---- files of other engines, and lists


@command(app, "export", "export:export")
class ExportOptions(LogOptions, MethodOptions):
    """Write the config of another engine for a method, and report what is lost."""

    to: str = option(REQUIRED, ENGINES)
    run: str | None = option(None, "Run of the log: its method and target.", metavar="ID")
    method: str = option("", METHOD_HELP)
    target: str | None = option(
        None, "Target: preset, path or hub id; default: the run's or method's."
    )
    part: str = option(
        "whole", "Of a combination, one of its methods: retrieval or model.", metavar="PART"
    )
    engine_version: str = option("", "Release of the engine; default: the newest stable one known.")
    output: Path | None = option(None, "Write the files here.", metavar="DIR")


@command(app, "models", "lists:models")
class ModelsOptions:
    """List the target presets."""


@command(app, "methods", "lists:methods")
class MethodsOptions:
    """List the drafting methods, their settings and their presets."""


@command(app, "import", "export:import_")
class ImportOptions:
    """Read another engine's config as a method file for `generate --method`."""

    file: str = argument(REQUIRED, "The config; - reads it from stdin.")
    source: str = option(REQUIRED, ENGINES, "--from")
    output: Path | None = option(None, "Write the method here.", metavar="FILE.yaml")


# ---- runs of the log


@command(runs, "list", "runs:list_")
class ListOptions(FilterOptions):
    """Print runs, the newest first."""

    sort: str = option(
        "created_at", "Figure or field: created_at, tok_s, mat, ttft_s, num_steps, …"
    )
    ascending: bool = option(False, "Smallest first.", "--ascending")
    limit: int = option(20, "Maximum number of runs to print.", min=1, max=1000)
    as_json: bool = option(False, "Print JSON.", "--json")


@command(runs, "export", "runs:export")
class ExportRunsOptions(FilterOptions):
    """Write runs to a file, oldest first: JSON has all of them, with every step."""

    file: Path = argument(
        REQUIRED, "FILE.json, FILE.json.gz or FILE.csv; - prints JSON.", metavar="FILE"
    )
    ids: list[str] | None = argument(None, "Only these runs.", metavar="ID…")


@command(runs, "import", "runs:import_")
class ImportRunsOptions(LogOptions):
    """Add exported runs to the log; a run that is here already is left as it is."""

    files: list[Path] = argument(REQUIRED, "Exported JSON files.", metavar="FILE…", exists=True)


@command(runs, "erase", "runs:erase")
class EraseOptions(LogOptions):
    """Erase the deleted runs, which are only hidden until then, and free their space."""

    ids: list[str] | None = argument(None, "Only these deleted runs.", metavar="ID…")


@command(runs, "copy", "runs:copy")
class CopyOptions:
    """Copy a log into another: runs, benchmarks, measurements, sweeps. Again adds what is new."""

    source: str | None = option(
        None, "Log to copy; default: the usual one.", "--from", metavar="URL"
    )
    into: str = option(REQUIRED, "Log to copy into; created if missing.", "--to", metavar="URL")


# ---- sets of prompts


@command(suites, "list", "suites:list_")
class ListSuitesOptions:
    """List what --suite takes: the shipped sets of prompts, and those that were fetched."""


@command(suites, "fetch", "suites:fetch")
class FetchOptions:
    """Fetch HumanEval or Spec-Bench, or read a copy, and keep it for --suite and the page."""

    name: str = argument(REQUIRED, "humaneval or spec-bench.")
    file: Path | None = option(
        None, "A local copy instead of a download; may be gzipped (.gz).", metavar="FILE"
    )


@command(suites, "export", "suites:export")
class ExportSuiteOptions:
    """Write a suite as the input file of another benchmark: the first turn of every prompt."""

    name: str = argument(REQUIRED, "Suite or file of prompts.")
    to: str = option("genai-perf", "genai-perf or trtllm-bench.")
    output: Path | None = option(None, "Write the file here.", metavar="FILE.jsonl")
    max_new_tokens: int = option(128, "Tokens per answer, for trtllm-bench.", min=1)
