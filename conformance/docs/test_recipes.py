"""The recipes of ``docs/guides/cluster``: they parse, and type commands that exist."""

import shlex
import subprocess
from pathlib import Path

import yaml

from rollmatch.cli import up
from rollmatch.cli.main import make_parser

RECIPES = Path(__file__).parents[2] / "docs/guides/cluster"


def parsed(command):
    """``rollmatch up ...`` by the parser of the command line."""
    name, *words = shlex.split(command)
    assert name == "rollmatch"
    return make_parser().parse_args(words)


def test_the_job_for_kubernetes_mounts_what_its_command_reads():
    job = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())
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
