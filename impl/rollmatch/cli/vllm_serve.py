"""A rollout server by command-line arguments alone, as ``trl vllm-serve`` and verifiers' guide name them.

    rollmatch vllm-serve --model MODEL_DIR --port 8000 --tensor_parallel_size 2 --max_model_len 8192

It is the server of ``rollmatch serve``: it speaks every dialect, and listens on loopback by default.
"""

import argparse

from rollmatch.cli.numbers import port, positive, share
from rollmatch.launch.vllm_serve import vllm_serve

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with the guide's arguments, each also with dashes in place of underscores."""
    parser = commands.add_parser("vllm-serve", help="start a rollout server by TRL's arguments, without a YAML")
    parser.set_defaults(command=vllm_serve)
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
    text = "name by which other machines may call a server without a key; may be given several; addresses always may"
    hosts = ("--allowed-hosts", "--allowed_hosts")
    parser.add_argument(*hosts, nargs="+", default=[], metavar="HOST", help=text)
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
