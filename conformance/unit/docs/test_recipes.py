"""The recipes of ``docs/guides/cluster``: they parse, fit KubeRay's schema, and type commands that exist."""

import gzip
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from rollmatch.cli.main import make_parser
from rollmatch.launch import up

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "docs/guides/cluster"


def parsed(command):
    """``rollmatch up ...`` by the parser of the command line."""
    name, *words = shlex.split(command)
    assert name == "rollmatch"
    return make_parser().parse_args(words)


def read_job():
    return yaml.safe_load((RECIPES / "rayjob.yaml").read_text())


def strict(schema):
    """A schema of a Kubernetes API that finds unknown fields, and those with rules in CEL, which nothing here reads.

    Objects without any known field (labels, ``metadata``) may have all.
    """
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-kubernetes-validations" in schema:
        return False
    made = {name: strict(each) for name, each in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        made["additionalProperties"] = False
    return made


def breaches_of(job):
    """Paths of what KubeRay's schema does not allow."""
    schema = json.loads(gzip.decompress((ROOT / "fixtures/kuberay/rayjob-v1.json.gz").read_bytes()))
    return {error.json_path for error in Draft202012Validator(strict(schema)).iter_errors(job)}


def test_the_job_for_kubernetes_fits_the_schema_of_kuberay():
    assert breaches_of(read_job()) == set()


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("spec", "entrypiont", "rollmatch up"),
        ("spec", "ttlSecondsAfterFinished", "600"),
        ("spec", "managedBy", "somebody"),
        ("spec.rayClusterSpec", "workerGroupSpecs", [{"groupName": "gpu"}]),
        ("spec.rayClusterSpec.headGroupSpec", "rayStartParams", {"num-cpus": 0}),
        ("spec.rayClusterSpec.headGroupSpec.template.spec", "volume", []),
        ("spec.rayClusterSpec.headGroupSpec.template.spec", "volumes", [{}]),
    ],
)
def test_a_field_that_kuberay_does_not_know_or_take_is_found(path, field, value):
    job = read_job()
    held = job
    for name in path.split("."):
        held = held[name]
    held[field] = value
    [breach] = breaches_of(job)
    assert breach.startswith(f"$.{path}")


def test_the_job_for_kubernetes_mounts_what_its_command_reads():
    job = read_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    options = parsed(job["spec"]["entrypoint"])
    assert options.command is up.up
    assert options.address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert any(Path(options.config).is_relative_to(mount["mountPath"]) for mount in container["volumeMounts"])
    [workers] = cluster["workerGroupSpecs"]
    [container] = pods[1]["containers"]
    assert options.learners <= container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.servers < workers["replicas"] + 1


def test_the_script_for_slurm_parses_and_types_our_command():
    script = RECIPES / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], check=False, capture_output=True).returncode == 0
    [command] = [line for line in script.read_text().splitlines() if line.startswith("rollmatch ")]
    assert parsed(command.removesuffix(" &")).command is up.up
