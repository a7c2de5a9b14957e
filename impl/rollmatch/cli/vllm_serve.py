"""A rollout server by command-line arguments alone, as ``trl vllm-serve`` and verifiers' guide name them.

    rollmatch vllm-serve --model MODEL_DIR --port 8000 --tensor_parallel_size 2 --max_model_len 8192

It is the server of ``rollmatch serve``: it speaks every dialect, and listens on loopback by default.
"""

import argparse
import json
import os
from collections.abc import Sequence

from rollmatch.cli.numbers import port, positive, share
from rollmatch.cli.processes import Command, become, has_gpu
from rollmatch.cli.rollout_server import server_environment, server_words
from rollmatch.errors import LaunchError
from rollmatch.model.source import local_directory
from rollmatch.server.port import bind_http
from rollmatch.server.settings import KEY_VARIABLE, ServerSettings, check_exposure

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_CACHE_MIB_ON_CPU = 512
_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE_MIB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The guide's arguments; each also with dashes in place of underscores."""
    parser.add_argument("--model", required=True, metavar="MODEL", help="model directory or hub id")
    parser.add_argument("--host", default="127.0.0.1", help="listen address (default: 127.0.0.1)")
    parser.add_argument("--port", type=port, default=8000, help="HTTP port")
    for name, kind, default, text in (
        ("tensor_parallel_size", positive, 1, "GPUs per replica"),
        ("data_parallel_size", positive, 1, "number of replicas"),
        ("max_model_len", positive, None, "prompt and response in tokens (default: the model's own)"),
        ("gpu_memory_utilization", share, 0.9, "share of each GPU's memory"),
        ("enable_prefix_caching", truth, None, "true or false (default: vLLM's own)"),
    ):
        dashed = name.replace("_", "-")
        parser.add_argument(f"--{name}", f"--{dashed}", dest=name, type=kind, default=default, help=text)
    names = "name of the model on the OpenAI routes, beside its directory; may be given several"
    parser.add_argument("--served-model-name", "--served_model_name", nargs="+", default=[], metavar="NAME", help=names)
    for name, text in (
        ("tool_call_parser", "vLLM's parser for tool calls on the OpenAI routes (hermes, llama3_json, ...)"),
        ("reasoning_parser", "vLLM's parser for reasoning on the OpenAI routes (qwen3, deepseek_r1, ...)"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name, metavar="NAME", help=text)
    text = "host from which images are fetched by URL; may be given several (default: none is fetched)"
    domains = ("--allowed-media-domains", "--allowed_media_domains")
    parser.add_argument(*domains, nargs="+", default=[], metavar="HOST", help=text)
    text = "let trainers of ms-swift send adapters alone, which the server merges into the model's own weights"
    parser.add_argument("--enable-lora", "--enable_lora", action="store_true", help=text)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="precision of the engine, as vLLM names it")
    text = "listen on an address other than loopback without a bearer key in ROLLMATCH_API_KEY"
    parser.add_argument("--allow-no-key", "--allow_no_key", action="store_true", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print the command and its environment; start nothing")


def truth(text: str) -> bool:
    """A switch as people write it.

    >>> truth("True"), truth("0")
    (True, False)
    """
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def vllm_serve(options: argparse.Namespace) -> int:
    """Become the server; returns only from a dry run.

    Errors: ``model-directory-missing``, ``OpenWithoutKey``, ``PortInUse``.
    """
    settings = make_settings(options, on_gpu=has_gpu())
    check_exposure(settings)
    command = make_command(settings, on_gpu=has_gpu())
    if not options.dry_run:
        bind_http(options.host, options.port).close()
        become(command)
    print(command)
    return 0


def make_settings(options: argparse.Namespace, *, on_gpu: bool) -> ServerSettings:
    """The arguments as server settings. Errors: ``model-directory-missing``."""
    model = local_directory(options.model, revision=None, key="--model")
    if not os.path.isdir(model):
        problem, remedy = f"{options.model} is no directory", "Name the directory of a saved model, or its hub id."
        raise LaunchError(problem, code="model-directory-missing", key="--model", remedy=remedy)
    arguments: dict[str, object] = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "enable_prefix_caching": options.enable_prefix_caching,
        "kv_cache_memory_bytes": None if on_gpu else int(os.environ.get(_CACHE_VARIABLE, _CACHE_MIB_ON_CPU)) << 20,
        "enforce_eager": None if on_gpu else True,
        "enable_chunked_prefill": None if on_gpu else False,  # vLLM 0.32 cannot cut a prompt whose sampling is seeded
    }
    return ServerSettings(
        model=model,
        dtype=options.dtype,
        max_model_len=options.max_model_len or own_length(model),
        host=options.host,
        api_key=os.environ.get(KEY_VARIABLE) or None,
        allow_no_key=options.allow_no_key,
        port=options.port,
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        served_model_names=(*options.served_model_name, *([options.model] if options.model != model else [])),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        enable_lora=options.enable_lora,
        allowed_media_domains=tuple(options.allowed_media_domains),
        engine_arguments={name: value for name, value in arguments.items() if value is not None},
    )


def own_length(model: str) -> int:
    """The longest sequence that a model's ``config.json`` names; 4096 where it names none."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        described = json.load(file)
    return int((described.get("text_config") or described).get("max_position_embeddings", 4096))


def make_command(settings: ServerSettings, *, on_gpu: bool) -> Command:
    """The command line and what is added to the environment; all GPUs that are visible stay visible."""
    words = server_words(settings, gpus=_visible(settings) if on_gpu else ())
    return Command(words=words, environment=server_environment(on_gpu=on_gpu, eager=not on_gpu))


def _visible(settings: ServerSettings) -> Sequence[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(visible.split(",")) if visible else tuple(map(str, range(settings.world_size)))
