"""The table for users of TRL's distillation and of verl's algorithm names every key of theirs."""

import re

import pytest

from conformance.doubles.digits import ROOT
from rollmatch.config.custom import DistillConfig, GrpoConfig, TeacherConfig

PAGE = (ROOT / "docs/guides/coming-from.md").read_text()
SECTION = PAGE[PAGE.index("## Distillation, and verl") : PAGE.index("## Keys of `transformers")]
THEIRS = {
    "TRL 1.10 GKDConfig": "temperature lmbda beta max_new_tokens teacher_model_name_or_path teacher_model_init_kwargs "
    "disable_dropout seq_kd",
    "TRL 1.10 DistillationConfig": "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs "
    "max_completion_length temperature beta",
    "TRL 1.10 ServerDistillationConfig": "teacher_model_server_url loss_top_k loss_add_tail reverse_kl_top_1_mode",
    "verl rollout_correction": "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold "
    "rollout_rs_threshold_lower rollout_token_veto_threshold bypass_old_logprob_for_rollout "
    "use_pure_rollout_correction rollout_is_batch_normalize",
    "verl distillation_loss": "loss_mode topk use_policy_loss distillation_loss_coef jsd_beta loss_max_clamp "
    "log_prob_min_clamp",
}
"""Fields that concern the algorithm; those of generation and of transformers have sections of their own."""


@pytest.mark.parametrize("source", THEIRS)
def test_every_key_of_theirs_is_in_the_table(source):
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", SECTION))))
    assert set(THEIRS[source].split()) - named == set()


def test_every_key_of_ours_that_it_names_exists():
    sections = {"D": {*DistillConfig.model_fields}, "G": {*GrpoConfig.model_fields}}
    found = re.findall(r"`([DG])\.(\w+)", SECTION)
    assert [pair for pair in found if pair[1] not in sections[pair[0]]] == []
    assert {"average", "weight", "when"} <= {*TeacherConfig.model_fields}
