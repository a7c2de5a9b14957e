"""All faults, by id. A fault lands together with the test that notices it."""

from conformance.harness.faults.client_faults import CLIENT
from conformance.harness.faults.config_faults import CONFIG
from conformance.harness.faults.data_faults import DATA
from conformance.harness.faults.environment_faults import ENVIRONMENT
from conformance.harness.faults.fault import Fault, collect
from conformance.harness.faults.grpo_faults import GRPO
from conformance.harness.faults.late_faults import LATE
from conformance.harness.faults.launch_faults import LAUNCH
from conformance.harness.faults.learn_faults import LEARN
from conformance.harness.faults.overlap_faults import OVERLAP
from conformance.harness.faults.ring_faults import RING
from conformance.harness.faults.rlhf_faults import RLHF
from conformance.harness.faults.rollout_faults import ROLLOUT
from conformance.harness.faults.rule_faults import RULES
from conformance.harness.faults.second_faults import SECOND
from conformance.harness.faults.server_faults import SERVER
from conformance.harness.faults.server_mode_faults import SERVER_MODE
from conformance.harness.faults.supervision_faults import SUPERVISION
from conformance.harness.faults.sync_faults import SYNC
from conformance.harness.faults.target_faults import TARGET
from conformance.harness.faults.third_faults import THIRD
from conformance.harness.faults.vineppo_faults import VINEPPO, VINEPPO_OBJECTIVE, VINEPPO_SERVER

BANK: dict[str, Fault] = collect(
    *(CONFIG, RULES, TARGET, LEARN, SUPERVISION, DATA, ROLLOUT, RING, SECOND, THIRD),
    *(CLIENT, SYNC, SERVER, SERVER_MODE, LAUNCH, VINEPPO, VINEPPO_SERVER, VINEPPO_OBJECTIVE, RLHF, GRPO, OVERLAP),
    *(ENVIRONMENT, LATE),
)
