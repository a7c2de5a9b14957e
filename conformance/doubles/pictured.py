"""Distillation of the digits model, which sees images, and its distribution outside the trainer."""

import torch

from conformance.doubles.digits import MODEL
from rollmatch.model.images import image_arguments

TEACHERS, ASKED = "custom.extra.distill.teachers=", "{question} Look well."
PICTURED = (
    "custom.trainer_variant=distill",
    "custom.extra.grpo.num_generations=2",
    "custom.extra.grpo.rewards=[]",
    "custom.extra.rollout_matching.decoding.temperature=1.0",
    "custom.extra.distill.loss=divergence",
    "custom.extra.distill.beta=0.5",
    "custom.extra.distill.top_k=5",
)


def served(url):
    return f'{TEACHERS}[{{base_url: "{url}", prompt: "{ASKED}"}}]'


def taught_here():
    return f'{TEACHERS}[{{model: {MODEL}, prompt: "{ASKED}"}}]'


@torch.no_grad()
def forward(model, template, sample, target):
    """[T, V] log-probabilities of target tokens behind a sample's prompt, by one plain forward pass."""
    features = template.image_features(sample)
    prompt = template.expand(template.prompt_token_ids(sample), features)
    ids = torch.tensor([[*prompt, *target]])
    logits = model(ids, **image_arguments(ids, [features], model)).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)
