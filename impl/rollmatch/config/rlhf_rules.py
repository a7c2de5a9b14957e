"""Rules on how GRPO names its rollout server, and on that server's own settings."""

from collections import Counter
from collections.abc import Iterator

from rollmatch.config.removed import ROLLOUT_MATCHING
from rollmatch.config.rule import Rule
from rollmatch.config.schema import RunConfig
from rollmatch.config.server_rules import ConnectionFormAmbiguous, PairingLengthMismatch, check_group_ports
from rollmatch.config.servers import is_named_in_rlhf
from rollmatch.config.translate import MissingKey, OutOfRange
from rollmatch.errors import ConfigError

HOST, PORT, GROUP_PORT = (f"rlhf.vllm_server_{name}" for name in ("host", "port", "group_port"))
ENGINE_LENGTH = "custom.extra.rollout_server.vllm_max_model_len"


class VllmModeUnused(ConfigError):
    """A vllm_mode is read only with use_vllm."""

    code = "vllm-mode-unused"


class RlhfNotRead(ConfigError):
    """Rollout matching names its servers in a section of its own and reads none of rlhf."""

    code = "rlhf-not-read"


class EngineShorterThanSegment(ConfigError):
    """The rollout server's engine takes prompt and response of any length that is learnt from."""

    code = "engine-shorter-than-segment"


class AdapterSyncInGrpo(ConfigError):
    """GRPO sends merged weights only."""

    code = "adapter-sync-in-grpo"


def _mode(config: RunConfig) -> Iterator[ConfigError]:
    rlhf = config.rlhf
    if rlhf.use_vllm and rlhf.vllm_mode is None:
        yield MissingKey(
            "use_vllm is true, this key is not set", key="rlhf.vllm_mode", remedy="Set server or colocate."
        )
    if rlhf.vllm_mode is not None and not rlhf.use_vllm:
        problem, remedy = f"is {rlhf.vllm_mode}, but use_vllm is false", "Set use_vllm to true, or remove vllm_mode."
        yield VllmModeUnused(problem, key="rlhf.vllm_mode", remedy=remedy)


def _variant(config: RunConfig) -> Iterator[ConfigError]:
    if config.rlhf.use_vllm and not config.custom.learns_from_rewards:
        remedy = f"Name servers in {ROLLOUT_MATCHING}.vllm.server, or set custom.trainer_variant to grpo."
        yield RlhfNotRead("is true, but custom.trainer_variant is not grpo", key="rlhf.use_vllm", remedy=remedy)


def _named(config: RunConfig) -> Iterator[ConfigError]:
    for key, told in ((HOST, config.rlhf.vllm_server_host), (PORT, config.rlhf.vllm_server_port)):
        if told is None and is_named_in_rlhf(config):
            problem = "vllm_mode is server, this key is not set"
            yield MissingKey(problem, key=key, remedy="Name the server by a list of one host and one of one port.")


def _pairs(config: RunConfig) -> Iterator[ConfigError]:
    hosts, ports, group_ports = (
        config.rlhf.vllm_server_host,
        config.rlhf.vllm_server_port,
        config.rlhf.vllm_server_group_port,
    )
    if hosts is None or ports is None:
        return
    if len(hosts) != len(ports):
        problem = f"names {len(ports)} ports, vllm_server_host {len(hosts)} hosts"
        yield PairingLengthMismatch(problem, key=PORT, remedy="Give each host one port.")
    elif twice := [host for host, count in Counter(hosts).items() if count > 1]:
        remedy = "One server on a machine: let data parallel sizes use its GPUs."
        yield OutOfRange(f"names {twice[0]} more than once", key=HOST, remedy=remedy)
    yield from check_group_ports(hosts, group_ports, key=GROUP_PORT, urls_key="vllm_server_host")


def _one_place(config: RunConfig) -> Iterator[ConfigError]:
    if not config.rlhf.use_vllm:
        return
    rules = config.custom.extra.rollout_matching
    named = rules.vllm.server.servers or rules.vllm.server.base_url or rules.vllm.server.group_port
    other = {
        f"{ROLLOUT_MATCHING}.rollout_backend": rules.rollout_backend == "hf",
        f"{ROLLOUT_MATCHING}.vllm.mode": rules.vllm.mode == "server" and config.rlhf.vllm_mode == "colocate",
        f"{ROLLOUT_MATCHING}.vllm.server": is_named_in_rlhf(config) and named is not None,
    }
    for key, contradicts in other.items():
        if contradicts:
            problem = f"rlhf.use_vllm is true with vllm_mode {config.rlhf.vllm_mode}, and this key says otherwise"
            yield ConnectionFormAmbiguous(problem, key=key, remedy="Remove one of the two.")


def _engine_length(config: RunConfig) -> Iterator[ConfigError]:
    told, longest = config.custom.extra.rollout_server.vllm_max_model_len, config.global_max_length
    if config.custom.trainer_variant == "grpo" and told is not None and told < longest:
        problem = f"must be at least global_max_length {longest}, but is {told}"
        remedy = "Raise it, leave it out, or lower global_max_length."
        yield EngineShorterThanSegment(problem, key=ENGINE_LENGTH, remedy=remedy)


def _merged(config: RunConfig) -> Iterator[ConfigError]:
    vllm = config.custom.extra.rollout_matching.vllm
    if is_named_in_rlhf(config) and vllm.carries_adapter:
        problem = f"{vllm.sync.mode} means adapter here, and GRPO sends merged weights"
        yield AdapterSyncInGrpo(problem, key=f"{ROLLOUT_MATCHING}.vllm.sync.mode", remedy="Set it to full.")


_MODE, _SERVER = ("rlhf.use_vllm", "rlhf.vllm_mode"), f"{ROLLOUT_MATCHING}.vllm"
_PLACES = (f"{ROLLOUT_MATCHING}.rollout_backend", f"{_SERVER}.mode", f"{_SERVER}.server")
RLHF_RULES: tuple[Rule, ...] = (
    Rule(reads=_MODE, check=_mode),
    Rule(reads=("rlhf.use_vllm", "custom.trainer_variant"), check=_variant),
    Rule(reads=(*_MODE, HOST, PORT), check=_named),
    Rule(reads=(HOST, PORT, GROUP_PORT), check=_pairs),
    Rule(reads=(*_MODE, *_PLACES), check=_one_place),
    Rule(reads=("custom.trainer_variant", "global_max_length", ENGINE_LENGTH), check=_engine_length),
    Rule(reads=(*_MODE, f"{_SERVER}.sync.mode", f"{_SERVER}.enable_lora"), check=_merged),
)
