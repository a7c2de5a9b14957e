"""How long the first sync of a run takes, and later ones: 8 GB of random weights, read from the run's own journal.

    NCCL_NVLS_ENABLE=0 VLLM_USE_FLASHINFER_SAMPLER=0 python -m benchmarks.gpu.first_sync --shapes dense experts

By default the engine is colocated, so that one GPU is enough; ``--mode server`` puts it on a GPU of its own. Shapes:
Qwen3-4B, and a Qwen3-MoE of as many bytes. Learning is full, so that every sync carries all weights. The engine begins
with weights of its own, and what it answers greedily after the last step is compared with what a fresh engine answers
that reads the run's checkpoint: one that is quick because it leaves something out would be found out.
"""

import argparse
import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml

from benchmarks.gpu.grpo_sides import VLLM, our_config
from benchmarks.gpu.grpo_step import FULL, TINY
from benchmarks.gpu.machine import describe
from benchmarks.gpu.random_qwen3 import SHAPE, SMALL_MODEL
from benchmarks.gpu.report import RESULTS, folder_of
from conformance.doubles.instance import free_port
from conformance.doubles.started import finish, journal_of, started
from rollmatch.config import load_config
from rollmatch.ranks import Ranks
from rollmatch.rollout.backend import Decoding, make_requests
from rollmatch.run.assemble import make_backend, make_template
from rollmatch.run.machine import set_environment
from rollmatch.run.preflight import load_checked

EXPERTS = {
    "hidden_size": 2048, "num_hidden_layers": 13, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 40_960,
    "initializer_range": 0.02, "tie_word_embeddings": False,
}  # fmt: skip
FEW_EXPERTS = EXPERTS | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
}  # fmt: skip
ANSWERS = "answers: "
FIRST_S, RESPONSE_LEN, STEPS, NUM_ASKED = 1.5, 32, 3, 4


def make_model(directory, kind, *, tiny):
    """The arithmetic model's tokenizer around random weights, in bfloat16 on a GPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(SMALL_MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    fields = json.loads((SMALL_MODEL / "config.json").read_text())
    num_known = fields["vocab_size"]
    if kind == "experts":
        fields |= (FEW_EXPERTS if tiny else EXPERTS) | {"model_type": "qwen3_moe"}
        fields |= {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": fields["vocab_size"] if tiny else 151_936}
    elif not tiny:
        fields |= SHAPE
    fields.pop("layer_types", None)
    config = (Qwen3MoeConfig if kind == "experts" else Qwen3Config).from_dict(fields)
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        dtype = torch.float32 if tiny else torch.bfloat16
        model = (Qwen3MoeForCausalLM if kind == "experts" else Qwen3ForCausalLM)._from_config(config, dtype=dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight[num_known:] = 0  # else it answers by ids that have no text to compare
    model.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()


def measure(kind, folder, options):
    """The run's syncs, in order, and what a second engine says of its checkpoint."""
    model, scale = folder / "model", (TINY if options.rehearse else FULL) | {"steps": STEPS}
    make_model(model, kind, tiny=options.rehearse)
    config = our_config(folder, model, scale | {"response_len": RESPONSE_LEN, "num_prompts": 2}, lora=False)
    fields = yaml.safe_load(config.read_text())
    if options.rehearse:
        fields["model"]["torch_dtype"], fields["training"]["bf16"] = "float32", False
    fields["training"] |= {"compile_layers": False}  # which takes a minute and has no part in a sync
    fields["training"] |= {"extra_arguments": {"save_only_model": True}}
    fields["training"] |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "optim": "sgd"}
    config.write_text(yaml.safe_dump(fields))
    sets = [f"training.output_dir={folder / 'run'}", *settings_of(options)]
    words = [word for setting in sets for word in ("--set", setting)]
    with server_of(config, folder, words, options):
        command = [sys.executable, "-m", "rollmatch", "train", str(config), *words]
        gpus = [] if options.rehearse else ["--gpus", "1" if options.mode == "server" else "0"]
        code, output = finish([*command, *gpus], folder / "train.txt")
    assert code == 0, output[-3000:]
    events = journal_of(folder / "run", "synced")
    timed = [{name: event[name] for name in ("version", "num_tensors", "num_bytes", "seconds")} for event in events]
    sys.stdout.write(f"{kind}: {json.dumps(timed)}\n")
    answers, fresh = answers_of(folder, words, options)
    assert any(answers), f"nothing to compare: {answers}"
    first, *later = [event["seconds"] for event in timed]
    return {"syncs": timed, "first_s": first, "later_s": later, "bar": FIRST_S, "met": first <= FIRST_S,
            "answers": len(answers), "equal_answers": sum(map(str.__eq__, answers, fresh))}  # fmt: skip


def answers_of(folder, words, options):
    """Greedy ones of the run's engine after its last step, and of a fresh engine with the checkpoint of that step."""
    record = json.loads((folder / f"run/evaluations/step-{STEPS:06}.json").read_text())
    command = [sys.executable, "-m", "benchmarks.gpu.first_sync", "--ask", str(folder), *words[1::2]]
    code, output = finish(command, folder / "ask.txt", **({} if options.rehearse else {"CUDA_VISIBLE_DEVICES": "0"}))
    assert code == 0, output[-3000:]
    fresh = next(line for line in output.splitlines() if line.startswith(ANSWERS))  # engines print around it
    return [answer["response_text"] for answer in record["answers"]], json.loads(fresh.removeprefix(ANSWERS))


def ask(folder, *settings):
    """Print the answers of an engine that reads the run's last checkpoint, as one line of JSON."""
    set_environment(eager=not torch.cuda.is_available())
    own = [f"model.model={folder}/run/checkpoint-{STEPS}", f"{VLLM}.load_format=auto", f"{VLLM}.mode=colocate"]
    run = load_config(f"{folder}/grpo.yaml", [*settings, *own])
    template, samples = make_template(run), load_checked(run)[1][:NUM_ASKED]
    backend = make_backend(run, None, template, ranks=Ranks(), journal=None)
    backend.policy_version = 1  # what it read is what is asked for
    requests = make_requests(samples, prompt_of=template.prompt_token_ids, run_seed=0, step=0, rank=0)
    rollouts = backend.generate(requests, Decoding(max_new_tokens=RESPONSE_LEN))
    answers = [template.vocabulary.text(rollout.response_token_ids) for rollout in rollouts]
    sys.stdout.write(f"\n{ANSWERS}{json.dumps(answers)}\n")


def settings_of(options):
    shared = [
        f"{VLLM}.load_format=dummy",
        f"{VLLM}.enforce_eager={str(options.eager).lower()}",
        f"training.eval_scenes={NUM_ASKED}",
        f"training.save_steps={STEPS}",
        "custom.extra.grpo.eval_temperature=0",
    ]
    if options.mode == "colocate":
        return shared if options.rehearse else [*shared, f"{VLLM}.gpu_memory_utilization=0.35"]
    port = free_port()
    return [
        *shared,
        f"{VLLM}.mode=server",
        f"{VLLM}.server.base_url=http://127.0.0.1:{port}",
        f"{VLLM}.server.group_port={free_port()}",
    ]


@contextmanager
def server_of(config, folder, words, options):
    """Up while its context lasts; none for a colocated engine."""
    if options.mode == "colocate":
        yield
        return
    gpus = [] if options.rehearse else ["--gpus", "0"]
    url = next(word for word in words if "base_url" in word).partition("=")[2]
    command = [sys.executable, "-m", "rollmatch", "serve", str(config), *words, *gpus]
    with started(command, folder / "server.txt") as server:
        server.wait_healthy(url)
        yield


def main():
    options = parse()
    results = {"machine": describe(), "mode": options.mode}
    for kind in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[kind] = measure(kind, Path(folder), options)
            finally:
                for log in Path(folder).glob("*.txt"):
                    shutil.copy(log, options.results / f"{kind}-{log.name}")
        (options.results / f"first_sync-{options.mode}.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(json.dumps({kind: results[kind] for kind in options.shapes}, indent=1) + "\n")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", choices=("dense", "experts"), default=["dense", "experts"])
    parser.add_argument("--mode", choices=("colocate", "server"), default="colocate")
    parser.add_argument("--eager", action="store_true", help="engines start sooner; weights arrive as fast")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, without GPUs")
    options = parser.parse_args()
    options.results = folder_of(options.results, is_rehearsal=options.rehearse)
    if not options.rehearse and torch.cuda.device_count() < (2 if options.mode == "server" else 1):
        parser.error(f"not testable: too few GPUs ({torch.cuda.device_count()})")
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ask"]:
        ask(*sys.argv[2:])
    else:
        main()
