"""Measured rates of GPUs and links: a YAML of figures, each with the machine it was measured on."""

import math
from itertools import pairwise
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from rollmatch.config.section import Positive, PositiveShare, Section
from rollmatch.errors import ConfigError, first_fault

MEASURED = Path(__file__).with_name("rates.yaml")


class DecodedModel(Section):
    """What the tokens per second were measured with."""

    weight_bytes: Positive
    """Read for every step."""
    kv_bytes_per_token: Positive
    """Of keys and values."""
    context: Positive
    """Tokens of a request, in the middle of its response."""


class GpuRates(Section):
    """Of one GPU."""

    memory_bytes: Positive
    """Of the device."""
    copy_bytes_s: Positive
    """Device to device, read and written."""
    matmul_flops_s: Positive
    """Of large bfloat16 products."""
    learn_flops_s: Positive | None = None
    """Reached by forward and backward of a packed row; null uses learn_share of matmul_flops_s."""
    decode_tok_s: dict[int, Positive] | None = None
    """Output tokens a second by requests at once; null scales another GPU's by memory speed."""


class LinkRates(Section):
    """Between GPUs."""

    inside_node_bytes_s: Positive
    """From one GPU to the others of its node."""
    between_nodes_bytes_s: Positive
    """From one node to another."""


class Rates(Section):
    """All figures."""

    decoded: DecodedModel
    """What the tokens per second were measured with."""
    gpus: dict[str, GpuRates] = Field(min_length=1)
    """By name."""
    links: LinkRates
    """Between GPUs."""
    learn_share: PositiveShare = 0.5
    """Of matmul_flops_s, where learn_flops_s is not measured."""
    dora_share: PositiveShare = 1.0
    """Of the speed of learning, that DoRA leaves: it measures every row of every weight in each forward pass."""
    merge_share: PositiveShare = 1.0
    """Of copy_bytes_s, that merging adapters into all weights reaches."""


def load_rates(path: Path | None = None) -> Rates:
    """The measured ones, or a file of one's own. Errors: ``rates-invalid``."""
    path = MEASURED if path is None else path
    try:
        return Rates.model_validate(_numbers(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            str(error), code="rates-invalid", key=str(path), remedy="Name a readable YAML file."
        ) from error
    except ValidationError as error:
        first = first_fault(error)
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            first["msg"], code="rates-invalid", key=f"{path}:{where}", remedy=f"See {MEASURED.name} for the form."
        ) from error


def _numbers(node: object) -> object:
    """YAML 1.1 reads 1e9 as text."""
    if isinstance(node, dict):
        return {key: _numbers(value) for key, value in node.items()}
    if isinstance(node, str):
        try:
            return float(node)
        except ValueError:
            return node
    return node


def gpu_of(rates: Rates, name: str) -> GpuRates:
    """One GPU's. Errors: ``rates-invalid``."""
    if name not in rates.gpus:
        remedy = f"Known are {', '.join(rates.gpus)}; --rates FILE brings others."
        raise ConfigError(f"no rates of {name!r}", code="rates-invalid", key="--gpu", remedy=remedy)
    return rates.gpus[name]


def decode_tok_s(rates: Rates, name: str, *, num_requests: int) -> float:
    """Output tokens a second of the measured model on one GPU, between measured points along powers. Errors: as above.

    >>> rates = load_rates()
    >>> [round(decode_tok_s(rates, "H100", num_requests=number)) for number in (1, 32, 256, 1000)]
    [145, 3423, 8829, 8829]
    """
    gpu = gpu_of(rates, name)
    if gpu.decode_tok_s is None:
        other, known = _measured_elsewhere(rates)
        return decode_tok_s(rates, other, num_requests=num_requests) * gpu.copy_bytes_s / known.copy_bytes_s
    points = sorted(gpu.decode_tok_s.items())
    if num_requests >= points[-1][0]:
        return points[-1][1]
    for (few, slow), (many, fast) in pairwise(points):
        if few <= num_requests <= many:
            power = math.log(num_requests / few) / math.log(many / few)
            return float(slow * (fast / slow) ** power)
    return points[0][1] * num_requests / points[0][0]


def _measured_elsewhere(rates: Rates) -> tuple[str, GpuRates]:
    measured = [(name, gpu) for name, gpu in rates.gpus.items() if gpu.decode_tok_s is not None]
    if not measured:
        raise ConfigError("no GPU has decode_tok_s", code="rates-invalid", key="gpus", remedy="Measure one.")
    return measured[0]


def decode_source(rates: Rates, name: str) -> str:
    """The GPU whose measured tokens per second stand for this one's."""
    return name if gpu_of(rates, name).decode_tok_s is not None else _measured_elsewhere(rates)[0]
