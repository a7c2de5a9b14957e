"""The table for users of TRL's distillation and of verl's algorithm names every key of theirs."""

import re
from dataclasses import dataclass

import pytest

from conformance.doubles.digits import ROOT
from rollmatch import GRPOTrainer
from rollmatch.config.custom import DistillConfig, GrpoConfig, TeacherConfig
from rollmatch.config.layers import merge, nested
from rollmatch.config.load import make


@dataclass
class GRPOConfig:
    """Fields of TRL's that the page sets."""

    output_dir: str
    max_completion_length: int = 512
    max_steps: int = -1
    vllm_importance_sampling_correction: bool = True


PAGE = (ROOT / "docs/guides/coming-from.md").read_text()
SECTION = PAGE[PAGE.index("## Distillation, and verl") : PAGE.index("## Keys of `transformers")]
THEIRS = {
    "TRL 1.10 GKDConfig": "temperature lmbda beta max_new_tokens teacher_model_name_or_path teacher_model_init_kwargs "
    "disable_dropout seq_kd",
    "TRL 1.10 SFTConfig": "learning_rate model_init_kwargs router_aux_loss_coef trust_remote_code chat_template_path "
    "dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing "
    "packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type "
    "activation_offloading pad_token",
    "TRL 1.16 DistillationConfig": "max_tool_calling_iterations",
    "TRL 1.10 DistillationConfig": "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs "
    "max_completion_length temperature beta model_init_kwargs trust_remote_code disable_dropout remove_unused_columns "
    "ds3_gather_for_generation shuffle_dataset pad_to_multiple_of top_p top_k min_p generation_kwargs "
    "chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl "
    "vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
    "log_completions num_completions_to_print log_unique_prompts",
    "TRL 1.10 ServerDistillationConfig": "teacher_model_server_url loss_top_k loss_add_tail reverse_kl_top_1_mode",
    "TRL 1.10 SDFTConfig": "teacher_model_kind teacher_update_rate teacher_sync_steps distillation_alpha "
    "distillation_mode distillation_topk distillation_is_clip distillation_add_tail generate_from_teacher "
    "teacher_prompt_template num_loss_tokens_to_skip",
    "verl 0.9.1 RolloutCorrectionConfig": "rollout_is rollout_is_threshold rollout_is_batch_normalize rollout_rs "
    "rollout_rs_threshold bypass_mode loss_type",
    "verl 0.9.1 SUPPORTED_ROLLOUT_RS_OPTIONS": "token_k1 token_k2 token_k3 seq_sum_k1 seq_sum_k2 seq_sum_k3 "
    "seq_mean_k1 seq_mean_k2 seq_mean_k3 seq_max_k2 seq_max_k3",
    "verl 0.6 and 0.7 rollout_correction": "rollout_rs_threshold_lower rollout_token_veto_threshold "
    "bypass_old_logprob_for_rollout use_pure_rollout_correction",
    "verl 0.9.1 DistillationLossConfig": "loss_mode topk use_task_rewards distillation_loss_coef loss_max_clamp "
    "log_prob_min_clamp use_chunked_topk chunked_topk_chunk_size use_policy_gradient policy_loss_mode clip_ratio "
    "clip_ratio_low clip_ratio_high k1 kl k2 k3 abs mse low_var_kl forward_kl_topk",
    "verl 0.9.1 DistillationConfig": "enabled n_gpus_per_node nnodes teacher_models teacher_key model_path key "
    "inference num_replicas",
    "verl 0.7 distillation_loss": "use_policy_loss jsd_beta",
    "verl 0.9.1 AlgoConfig": "gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl "
    "use_pf_ppo pf_ppo filter_groups rollout_correction gdpo_reward_keys gdpo_reward_weights metric "
    "max_num_gen_batches max_inflight_gen_batches",
    "verl 0.9.1 PolicyLossConfig": "loss_mode dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo "
    "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta",
}
"""All fields of TRL's DistillationConfig, GKDConfig and SFTConfig, and of verl's rollout_correction; of the others
those that concern the algorithm."""


ASYNC = PAGE[PAGE.index("## TRL's AsyncGRPOTrainer") : PAGE.index("## Distillation, and verl")]
OF_ASYNC = (
    "model_init_kwargs dtype trust_remote_code router_aux_loss_coef num_generations max_completion_length temperature "
    "top_p top_k min_p repetition_penalty chat_template_kwargs max_tool_calling_iterations fork_threshold_tokens "
    "vllm_server_base_url vllm_server_timeout request_timeout weight_sync_timeout "
    "epsilon epsilon_high token_budget max_inflight_tasks "
    "max_staleness queue_maxsize weight_sync_steps heartbeat_stale_after_s log_completions num_completions_to_print "
    "learning_rate logging_steps lr_scheduler_type ignore_data_skip "
    "model reward_funcs args train_dataset processing_class callbacks optimizers peft_config tools environment_factory "
    "rollout_worker weight_transfer"
)
"""Fields of TRL 1.16's AsyncGRPOConfig, and arguments of its AsyncGRPOTrainer."""


def test_every_argument_of_the_asynchronous_trainer_is_on_the_page():
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", ASYNC))))
    assert set(OF_ASYNC.split()) - named == set()


def test_the_asynchronous_example_is_a_configuration():
    """As it is printed, but for what is not installed everywhere."""
    (block,) = re.findall(r"```python\n(.*?)```", ASYNC, re.DOTALL)
    given = {"GRPOTrainer": GRPOTrainer, "GRPOConfig": GRPOConfig, "accuracy_reward": len, "dataset": [{"prompt": "?"}]}
    there = {"custom.train_jsonl": "train.jsonl", "custom.extra.grpo.rewards": [{"function": "builtins:len"}]}
    made = make(merge(eval(block, given).config, nested(there)))
    rollout = made.custom.extra.rollout_matching
    assert (rollout.overlap, rollout.vllm.server.base_url) == ("ahead", "http://localhost:8000")
    assert made.custom.extra.grpo.old_logprobs == "server"


@pytest.mark.parametrize("source", THEIRS)
def test_every_key_of_theirs_is_in_the_table(source):
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", SECTION))))
    assert set(THEIRS[source].split()) - named == set()


def test_every_key_of_ours_that_it_names_exists():
    sections = {"D": {*DistillConfig.model_fields}, "G": {*GrpoConfig.model_fields}}
    found = re.findall(r"`([DG])\.(\w+)", SECTION)
    assert [pair for pair in found if pair[1] not in sections[pair[0]]] == []
    assert {"average", "weight", "when"} <= {*TeacherConfig.model_fields}
