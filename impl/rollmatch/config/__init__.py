"""YAML and ``extends`` -> one checked, frozen tree. Needs no torch."""

from rollmatch.config.files import check_files
from rollmatch.config.load import load_config, make
from rollmatch.config.schema import RunConfig, json_schema, resolved_yaml

__all__ = ["RunConfig", "check_files", "json_schema", "load_config", "make", "resolved_yaml"]
