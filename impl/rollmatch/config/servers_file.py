"""The file of ``vllm.server.servers_file``: a list of rollout servers that a running job reads again."""

from pathlib import Path

from pydantic import ValidationError

from rollmatch.config.connection import ServerConfig, ServerEntry
from rollmatch.config.findings import ROLLOUT_MATCHING
from rollmatch.config.yaml_dialect import parse_value
from rollmatch.errors import ConfigError, ErrorList, first_fault

SERVERS_FILE = f"{ROLLOUT_MATCHING}.vllm.server.servers_file"


def read_entries(path: str) -> tuple[ServerEntry, ...]:
    """The servers in the order of the file, at least one. Errors: ``servers-file-invalid``."""
    try:
        found = parse_value(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, list):
            raise _malformed_list(f"{path} holds no list")
        return ServerConfig.model_validate({"servers": found}).servers or ()
    except OSError as error:
        raise _malformed_list(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _malformed_list(f"{path} is not UTF-8") from error
    except ErrorList as several:
        raise _malformed_list(f"{path}: {several.errors[0].problem}") from several
    except ValidationError as faults:
        first = first_fault(faults)
        place = ".".join(map(str, first["loc"]))
        raise _malformed_list(f"{path}: {place}: {first['msg']}") from faults


def _malformed_list(problem: str) -> ConfigError:
    remedy = "Write a list such as [{base_url: http://127.0.0.1:8000, group_port: 51216}]."
    return ConfigError(problem, code="servers-file-invalid", key=SERVERS_FILE, remedy=remedy)
