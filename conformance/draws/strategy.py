"""Whole valid runs, at random. A value is neutral only where it was drawn so."""

from hypothesis import strategies as st

from conformance.draws.models import PACKABLE
from conformance.oracle.defaults import D, E, G, R, T, V, below
from conformance.oracle.script import BOXES, NAMES
from rollmatch.model.policy import LARGE_VOCABULARY

HERE = "conformance.oracle.rewards"
SIZES = ("32-32", "64-32", "32-96")
COSTLY = 0.05
"""Share of draws that have several ranks: processes take ten seconds to start."""


PLAIN = {
    "custom.trainer_variant": "grpo",
    f"{R}.rollout_backend": "hf",
    f"{R}.decoding.temperature": 0.7,
    f"{R}.max_new_tokens": 5,
    f"{G}.rewards": [{"function": f"{HERE}:spread"}],
    "global_max_length": 64,
}
WRONG = (
    ({f"{T}.packing_buffer": 0}, "out-of-range", f"{T}.packing_buffer"),
    ({f"{T}.max_step": 3}, "unknown-key", f"{T}.max_step"),
    ({f"{G}.beta": -1.0}, "out-of-range", f"{G}.beta"),
    ({f"{G}.ratio_cap": 1.0}, "ratio-cap-under-clip", f"{G}.ratio_cap"),
    ({f"{R}.pieces_per_server": 4, f"{R}.overlap": "off"}, "late-work-needs-overlap", f"{R}.pieces_per_server"),
    ({f"{R}.late_windows": 1}, "late-windows-undefined", f"{R}.late_windows"),
    ({f"{R}.decoding.top_p": 0}, "out-of-range", f"{R}.decoding.top_p"),
    ({"tuner.use_dora": True, "tuner.train_type": "full"}, "dora-without-lora", "tuner.use_dora"),
    ({"tuner.freeze_vits": True}, "unknown-key", "tuner.freeze_vits"),
)
"""Keys that are wrong beside ``PLAIN``, with code and key of the refusal; none hides another."""


@st.composite
def runs(draw, ranks=None):
    """A draw: family, samples, keys; also servers, ranks, dropout, the step to resume from.

    ``ranks``: their number, where it is not to be drawn.
    """

    def one_of(*values):
        return draw(st.sampled_from(values))

    variant = one_of("grpo", "grpo", "distill", "vineppo", "vineppo_mcts", "rollout_matching_sft", "sft")
    made = {"keys": {"custom.trainer_variant": variant}, "servers": []}
    is_paid = variant not in ("sft", "rollout_matching_sft")
    made["family"] = one_of("qwen3", "llama", "granite", "gemma3_text", "qwen3_vl") if is_paid else "qwen3_vl"
    made["keys"] |= _training(one_of, made) | _decoding(one_of)
    if (
        variant.startswith("vineppo")
        or variant == "rollout_matching_sft"
        or (variant in ("grpo", "distill") and one_of(1, 0))
    ):
        _servers(one_of, made)
    else:
        made["keys"] |= {f"{R}.rollout_backend": "hf", f"{R}.rollout_generate_batch_size": one_of(1, 3)}
    made["keys"] |= _grpo(one_of, made) | _vineppo(one_of) if is_paid else _matching(one_of, made)
    if made["servers"] and variant in ("grpo", "distill") and not any(one.get("fails") for one in made["servers"]):
        _world(one_of, made)
    if variant.startswith("vineppo") and not any(one.get("fails") for one in made["servers"]):
        made["dialect"] = one_of("native", "native", "trl", "trl" if made["family"] == "qwen3_vl" else "vllm")
    if variant == "distill":
        _distill(one_of, made)
    made["keys"] |= {"custom.prompts.system": one_of("", "s")}
    made["samples"] = [_sample(one_of, made, number) for number in range(one_of(3, 5, 8))]
    _tuner(one_of, made)
    _turns(one_of, made)
    if is_paid and variant != "distill" and f"{E}.name" not in made["keys"]:
        _overlong(one_of, made)
    overlaps = variant in ("grpo", "distill") or (variant.startswith("vine") and made.get("dialect") == "native")
    if made["servers"] and not any(one.get("fails") for one in made["servers"]) and overlaps:
        _ahead(one_of, made)
    number = ranks or one_of(2, 3) if ranks or draw(st.integers(0, 99)) >= 100 - 100 * COSTLY else 1
    if number > 1 and "dropout" not in made:
        made["ranks"] = number
        made["keys"][f"{T}.strategy"] = one_of("ddp", "fsdp2")
    elif draw(st.integers(0, 99)) >= 90:
        made["wrong"] = sorted({one_of(*range(len(WRONG))) for _ in range(4)})
        return made
    if not any(one.get("fails") for one in made["servers"]) and one_of(0, 0, 1) and _may_resume(made):
        made["resume"] = one_of(*range(1, made["keys"][f"{T}.max_steps"]))
    return made


def _may_resume(made):
    """Continuations are found by their version, and other servers than ours count from 1 in a resumed run.

    What three ranks add up is rounded by DDP's buckets, which each process lays out again after its first pass.
    """
    if made.get("ranks", 1) > 2:
        return False
    return made.get("dialect", "native") == "native" or not made["keys"]["custom.trainer_variant"].startswith("vine")


def _training(one_of, made):
    keys = {
        "seed": one_of(7, 0, 12345),
        "max_steps": one_of(2, 3, 4),
        "per_device_train_batch_size": one_of(1, 2),
        "gradient_accumulation_steps": one_of(1, 2),
        "learning_rate": one_of(0.03, 0.1, 0.0),
        "lr_scheduler_type": one_of("constant", "linear", "cosine", "constant_with_warmup"),
        "warmup_steps": one_of(0, 2, 0.3),
        "weight_decay": one_of(0.0, 0.1),
        "max_grad_norm": one_of(0.5, 1e9, 0),
        "optim": one_of("sgd", "sgd", "adamw_torch"),
        "eval_scenes": one_of(1, 2, 3),
        "eval_steps": one_of(0, 0, 1, 2),
        "gradient_checkpointing": one_of("auto", True, False),
    }
    if keys["optim"] == "sgd" and keys["max_grad_norm"] != 0.5:
        keys["learning_rate"] /= 30  # a step stays a step
    if keys["optim"] == "adamw_torch":
        keys |= {"adam_beta1": one_of(0.9, 0.5, 0.0), "adam_beta2": one_of(0.999, 0.8), "adam_epsilon": 0.01}
    is_paid = made["keys"]["custom.trainer_variant"] not in ("sft", "rollout_matching_sft")
    lengths = (420, 600) if not is_paid else (122, 142) if made["family"] == "qwen3_vl" else (76, 84)
    length, attention = one_of(*lengths), one_of("packed", "sdpa", "eager")
    if made["family"] in PACKABLE and attention == "packed":
        keys |= one_of({}, {"packing": True}, {"packing": True, "packing_drop_last": True}, {"padding_free": True})
        if "packing" not in keys and one_of(True, False):
            keys |= {"tokens_per_micro_batch": length, "gradient_accumulation_steps": 1}
        if {"packing", "padding_free", "tokens_per_micro_batch"} & keys.keys():
            keys["share_prompts"] = one_of("auto", True, False)
    return {f"{T}.{name}": value for name, value in keys.items()} | {
        "global_max_length": length,
        "model.attn_impl": attention,
    }


def _decoding(one_of):
    return {
        f"{R}.max_new_tokens": one_of(5, 3, 7),
        f"{R}.decoding.temperature": one_of(0.7, 1.3, 1.0),
        f"{R}.decoding.top_p": one_of(0.9, 1.0),
        f"{R}.decoding.top_k": one_of(-1, 20),
        f"{R}.repetition_penalty": one_of(1.0, 1.2, 3.0),
    }


def _servers(one_of, made):
    """One to three; one of several may go away for good, or drop a connection."""
    made["servers"] = [{} for _ in range(one_of(1, 2, 3))]
    if len(made["servers"]) > 1 and one_of(False, False, True):
        place = one_of(*range(len(made["servers"])))
        made["servers"][place] = {"fails": [["infer", one_of(3, 4, 5), one_of("drop", "away")]]}
        made["keys"] |= {f"{R}.vllm.server.min_servers": 1, f"{R}.vllm.server.retry_budget_s": 0.3}


def _grpo(one_of, made):
    variant = made["keys"]["custom.trainer_variant"]
    rewards = [{"function": f"{HERE}:spread", "weight": one_of(1.0, 0.3)}]
    rewards = one_of(rewards, [*rewards, {"function": f"{HERE}:long", "weight": -0.5}])
    keys = {
        "num_generations": one_of(2, 3),
        "rewards": one_of(rewards, rewards, [{"function": f"{HERE}:fails"}]) if variant == "grpo" else rewards,
        "baseline": one_of("mean", "leave_one_out"),
        "scale_rewards": one_of("group", "batch", "none"),
        "mask_truncated_completions": one_of(False, True),
        "normalize": one_of("token", "sequence", "constant"),
        "epsilon": one_of(0.2, 0.01),
        "epsilon_high": one_of(None, 0.28, 0.005),
        "ratio_cap": one_of(None, 1.5),
        "beta": one_of(0.0, 0.1, 0.003),
        "old_logprobs": one_of("recomputed", "server"),
        "correction_cap": one_of(2.0, None, 0.9),
        "eval_temperature": one_of(0.0, 0.8),
        "steps_per_generation": one_of(1, 1, 2),
        "num_iterations": one_of(1, 1, 2),
    }
    keys |= one_of({}, {"dynamic_sampling.max_rounds": one_of(1, 2)}) if variant == "grpo" else {}
    _gradient(one_of, made, keys)
    return {f"{G}.{name}": value for name, value in keys.items()}


def _gradient(one_of, made, keys):
    """Other ratios, clips and corrections, and entropies; by the pairs that papers define."""
    training, variant = below(made["keys"], T), made["keys"]["custom.trainer_variant"]
    kind = one_of("", "", "gspo", "cispo")
    if kind == "gspo" and variant == "grpo":
        keys.pop("ratio_cap")
        keys |= {"importance": "sequence"}
    elif kind == "cispo":
        keys.pop("epsilon")
        keys.pop("ratio_cap")
        keys |= {"clip": "cispo", "epsilon_high": one_of(4.0, 0.28, 0.005)}
    if variant != "distill":
        keys |= one_of({}, {}, {"entropy_coef": one_of(0.1, 0.003)})
        is_plain = "clip" not in keys and "importance" not in keys and training["gradient_accumulation_steps"] == 1
        is_plain = is_plain and not {"packing", "tokens_per_micro_batch"} & training.keys()  # a micro-batch is the step
        keys |= {"top_entropy_share": one_of(0.5, 0.25)} if is_plain and one_of(0, 0, 1) else {}
    if keys["old_logprobs"] == "recomputed" and one_of(0, 1):
        keys.pop("correction_cap")
        level, mode = one_of("token", "sequence"), one_of("truncate", "mask")
        level, mode = one_of((level, mode), ("geometric", "mask"))
        keys |= {"correction.level": level, "correction.mode": mode, "correction.high": one_of(2.0, 400.0, 1e4)}
        keys |= one_of({}, {"correction.low": one_of(0.5, 1.9)})


TEACHERS = (
    [{"prompt": "{question}{a}"}],
    [{"self": True, "prompt": "{question} {a}", "weight": 0.5}],
    [{"self": True, "prompt": "{a}{question}", "average": 0.5}],
    [{"weight": 2.0, "when": {"kind": 1}}, {"self": True, "prompt": "{question}{a}"}],
)
"""Entries; those without ``self`` name the model before training."""
SERVED = [{"base_url": True, "prompt": "{question}{a}"}]
"""A server of that model: it knows temperature 1 alone, and no pictures."""
OF_THE_GRADIENT = ("baseline", "scale_rewards", "epsilon", "epsilon_high", "ratio_cap", "old_logprobs", "clip")
OF_THE_GRADIENT += ("correction_cap", *(f"correction.{name}" for name in ("level", "mode", "low", "high")))


def _distill(one_of, made):
    """Teachers, with rewards or without; a divergence without rewards has no policy gradient."""
    keys = made["keys"]
    keys |= {f"{D}.teachers": one_of(*TEACHERS, *([] if made["family"] == "qwen3_vl" else [SERVED, SERVED]))}
    if keys[f"{D}.teachers"] == SERVED:
        keys[f"{R}.decoding.temperature"] = 1.0
    if one_of(1, 0, 0):
        keys |= {f"{D}.loss": "divergence", f"{D}.beta": one_of(0, 0.3, 1), f"{D}.top_k": one_of(1, 4, 20)}
    if f"{E}.name" not in keys and one_of(0, 1):
        return
    if f"{E}.name" in keys and one_of(0, 1):
        keys |= {f"{D}.environment_weight": one_of(0.5, 2.0), f"{G}.rewards": [], f"{G}.num_generations": 2}
        return
    keys |= {f"{G}.rewards": [], f"{G}.num_generations": one_of(1, 2)}
    if f"{D}.loss" in keys:
        for name in OF_THE_GRADIENT:
            keys.pop(f"{G}.{name}", None)
        if keys[f"{G}.num_generations"] == 1 and keys[f"{G}.beta"] == 0 and f"{E}.name" not in keys:
            keys |= one_of({}, {f"{D}.lmbda": 0.5, f"{D}.answers": "{a}"})


def _vineppo(one_of):
    keys = {
        "num_continuations": one_of(2, 3),
        "siblings": one_of("none", "prompt", "all"),
        "steps": one_of("lines", "tokens", "low_probability"),
        "step_tokens": one_of(2, 3),
        "step_probability": 0.001,  # of the scripts' log-probabilities, -8 to -6, some are below
        "step_every": one_of(1, 2),
        "answer_mark": one_of("", "1"),
        "max_steps": one_of(None, 2),
        "normalization": one_of("whiten", "scale", "none"),
        "unfinished_return": one_of(0.0, None, -1.0),
        "first_continuations": one_of(None, None, 1),
        "search.select": one_of("uct", "puct"),
        "search.exploration": one_of(1.0, 0.3),
        "search.widening": one_of(1.0, 1.7),
        "search.num_rounds": one_of(1, 2),
        "search.num_per_round": one_of(1, 3),
        "search.num_least": one_of(1, 2),
    }
    return {f"{V}.{name}": value for name, value in keys.items()}


def _matching(one_of, made):
    keys = {
        "candidate_top_k": one_of(10, 1),
        "maskiou_gate": one_of(0.3, 0.8, 0.0),
        "maskiou_resolution": one_of(256, 40),
        "fp_cost": one_of(1.0, 0.2, 0.0),
        "fn_cost": one_of(1.0, 0.1, 0.0),
        "target_sigma": one_of(2.0, 0.7),
        "target_truncate": one_of(None, 3),
        "temperature_coord": one_of(1.0, 1.7),
        "soft_ce_weight": one_of(1.0, 0.3, 0.0),
        "w1_weight": one_of(1.0, 0.0, 5.0),
        "gate_weight": one_of(0.0, 0.4),
        "desc_ce_weight": one_of(1.0, 0.0, 0.5),
        "desc_ce_weight_matched": one_of(0.0, 0.5),
        "eval_iou": one_of(0.5, 0.9),
        "max_new_tokens": one_of(160, 90) if made["servers"] else 4,
    }
    if not any(keys[f"{name}_weight"] for name in ("soft_ce", "w1", "gate")):  # refused: nothing trains coordinates
        keys["w1_weight"] = 5.0
    prompts = {"custom.prompts.user": "find"}
    prompts |= {"custom.object_ordering": one_of("as_given", "sorted")}
    return {f"{R}.{name}": value for name, value in keys.items()} | prompts


def _sample(one_of, made, number):
    one = _asked(one_of, made, number) | one_of({}, {}, {"system": ""}, {"system": "o"})
    if made["keys"]["custom.trainer_variant"] == "distill":
        one |= {"metadata": {"a": one_of("1", "b.", " a"), "kind": one_of(0, 1)}}
    return one


def _asked(one_of, made, number):
    """A prompt, or a chat with up to three pictures, in any message, where the family takes them; prompts differ."""
    pictures = [f"{one_of(*SIZES)}-{number}{i}.png" for i in range(one_of(0, 1, 2, 3))]
    if made["keys"]["custom.trainer_variant"] in ("sft", "rollout_matching_sft"):
        objects = [{"desc": one_of(*NAMES), "bbox_2d": list(one_of(*BOXES))} for _ in range(one_of(0, 1, 2, 3))]
        width, height = map(int, (size := one_of(*SIZES)).split("-"))
        return {"images": [f"{size}-{number}.png"], "objects": objects, "width": width, "height": height}
    pictures = pictures if made["family"] == "qwen3_vl" else []
    if not pictures and one_of(True, False):
        return {"prompt": f"{number}{one_of('a', 'é+', ' bc')}"}
    texts = [f"{number}", one_of("x", "yé")][: one_of(1, 2)]
    for _ in pictures:
        place = one_of(*range(len(texts)))
        texts[place] = one_of("<image>{}", "{}<image>", "{}<image>z").format(texts[place])
    chat = [texts[0]] if len(texts) == 1 else [texts[0], "ok", texts[1]]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, chat, strict=False)]
    return {"images": pictures, "messages": messages}


def _tuner(one_of, made):
    """Adapters, frozen parts, or dropout that can be followed."""
    kind = one_of("full", "full", "lora", "frozen", "dropout")
    keys = made["keys"]
    if kind == "lora":
        keys |= {"tuner.train_type": "lora", "tuner.lora_rank": one_of(2, 4), "tuner.lora_alpha": one_of(3, 8)}
        keys |= one_of({}, {"tuner.use_rslora": True}, {"tuner.use_dora": True})
        targets = [".*layers.0.*(q|down)_proj", ".*language_model.*_proj|model.layers.*_proj"]
        targets += [".*visual.blocks.*(qkv|fc1)"] if made["family"] == "qwen3_vl" else []
        keys |= {"tuner.target_regex": one_of(*targets)}
        wide, deep = ("qkv", "linear_fc1") if "visual" in keys["tuner.target_regex"] else ("q_proj", "down_proj")
        keys |= one_of({}, {"tuner.rank_pattern": {deep: 3}}) | one_of({}, {"tuner.alpha_pattern": {wide: 5}})
        keys |= {f"{T}.lr_scheduler_type": one_of("linear", "cosine"), f"{T}.warmup_steps": 1}
        if "tuner.use_dora" not in keys and one_of(0, 1):
            keys["tuner.lora_dropout"], kind = 0.2, "dropout"
    if kind != "dropout":
        made |= one_of({}, {}, {"rows": LARGE_VOCABULARY})  # the loss is scored within the head, as on GPUs
    if kind == "frozen" and made["family"] == "qwen3_vl":
        part = one_of("vit", "aligner", "llm")
        keys |= {f"tuner.freeze_{part}": True}
    elif kind == "dropout":
        made["dropout"] = 0.25
        keys |= {"model.attn_impl": "eager", "training.callbacks": ["conformance.draws.models:SteadyDropout"]}
        for name in ("packing", "padding_free", "tokens_per_micro_batch", "share_prompts"):
            keys.pop(f"{T}.{name}", None)


def _turns(one_of, made):
    """What a turn ends with, which an environment replies to by the template, and what the template writes first."""
    keys = made["keys"]
    keys |= one_of({}, {}, {"model.stop_token": "<|endoftext|>"}) if f"{E}.name" not in keys else {}
    keys |= one_of({}, {}, {"model.chat_template_kwargs": {"mark": "m"}}) if made.get("dialect") != "swift" else {}


def _overlong(one_of, made):
    """Some prompts leave too little for a response."""
    keys = one_of({}, {}, {"overlong": "error"}, {"overlong": "skip"}, {"overlong": "truncate_left"})
    if keys and made["keys"]["custom.trainer_variant"].startswith("vine") and keys["overlong"] == "truncate_left":
        return  # prompts that are cut may be equal, and continuations are known by them
    lengths = (60, 48) if made["family"] == "qwen3_vl" else (42, 34)
    made["keys"] |= keys | ({"global_max_length": one_of(*lengths)} if keys else {})


def _world(one_of, made):
    """Turns in an environment, or servers of another dialect."""
    variant = made["keys"]["custom.trainer_variant"]
    kind = one_of("", "world", *(("vllm", "trl", "swift") if variant == "grpo" else ()))
    if kind == "world":
        keys = {
            "name": "conformance.oracle.echo:Echo",
            "max_turns": one_of(2, 3, 1),
            "max_response_tokens": one_of(40, 9),
        }
        made["keys"] |= {f"{E}.{name}": value for name, value in keys.items()}
        made["keys"] |= {f"{E}.observations": one_of("text", "chat"), "global_max_length": one_of(122, 142)}
        if made["keys"].pop(f"{T}.tokens_per_micro_batch", None):
            made["keys"].pop(f"{T}.share_prompts")
        for name in ("rewards", "dynamic_sampling.max_rounds"):
            made["keys"].pop(f"{G}.{name}", None)
    elif kind:
        made["dialect"] = kind


def _ahead(one_of, made):
    """Rollouts of later windows are requested while the learner learns."""
    keys = made["keys"]
    length = keys[f"{G}.steps_per_generation"] * keys[f"{G}.num_iterations"]
    if one_of(0, 1) and f"{T}.packing" not in keys and f"{D}.lmbda" not in keys:
        keys.pop(f"{G}.dynamic_sampling.max_rounds", None)
        is_judged = made["keys"]["custom.trainer_variant"].startswith("vine")  # by the weights that wrote a window
        more = 0 if is_judged and length == 1 else one_of(0, 1)
        keys |= {f"{R}.overlap": "ahead", f"{R}.max_staleness": 2 * length - 1 + more}
        keys |= one_of({}, {f"{R}.pieces_per_server": 2})
        if f"{E}.name" in keys:
            keys |= {f"{E}.options": {"delay_s": one_of(0.0, 0.3)}}
            keys[f"{R}.vllm.sync.in_flight"] = one_of("wait", "keep", "restart") if "dialect" not in made else "wait"
            if keys[f"{R}.vllm.sync.in_flight"] == "keep" and f"{R}.pieces_per_server" not in keys:
                late = one_of(0, 1, 2)
                keys |= {f"{R}.late_windows": late, f"{R}.max_staleness": (late + 2) * length - 1 + one_of(0, 1)}
        elif "dialect" not in made and not is_judged:
            keys[f"{R}.vllm.sync.in_flight"] = one_of("wait", "keep")
        if keys.get(f"{G}.correction_cap", 2.0) is None:
            keys[f"{G}.old_logprobs"] = "server"
