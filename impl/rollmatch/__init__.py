"""Train a (vision-)language model on its own rollouts.

One step, in ``training.trainer``::

     samples -> rollout -> target -> learn -> sync -> next step

``records`` names what passes between the packages. A module imports only its own package and those before it in this
order: errors, records, journal, ranks, config, data, model, weights, server, dialects, rollout, learn, environments,
objectives, rewards, training, report, plan, run, serve, launch, interop, api, cli.
``conformance/unit/test_architecture.py`` holds the order.

The names in ``__all__`` are public and stable; everything else may change. They are imported when first used, so that
``import rollmatch`` loads neither torch nor vLLM.
"""

from importlib import import_module

__version__ = "0.2.0"

_MODULES = {
    "api": ("GRPOTrainer", "VinePPOMCTSTrainer", "VinePPOTrainer", "train"),
    "config": ("RunConfig",),
    "config.load": ("load_config",),
    "data": ("load_samples",),
    "dialects.session": ("ClientSettings", "RolloutServer"),
    "dialects.trl.vllm_client": ("VLLMClient",),
    "errors": ("ErrorList", "RollmatchError"),
    "learn.pack": ("Packer", "pack"),
    "model.vocabulary": ("Vocabulary",),
    "environments.environment": ("ActionUnparsable", "Environment"),
    "objectives.grpo.advantage": ("group_advantages",),
    "objectives.grpo.reward": ("RewardFunction",),
    "objectives.rollout_matching.answer_format": ("AnswerFormat",),
    "objectives.rollout_matching.answer": ("parse_answer",),
    "objectives.rollout_matching.match": ("MatchRules", "match_objects"),
    "objectives.rollout_matching.parse": ("parse_rollout",),
    "objectives.rollout_matching.target": ("append_missed", "serialize_objects"),
    "records": ("GroundTruth", "Matching", "ParsedRollout", "PredictedObject", "Rollout", "Row", "Sample", "Segment"),
    "training.trainer": ("RolloutTrainer",),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


_OF_TRL = {
    "GRPOConfig": "import it from trl, or pass GRPOTrainer(config={...})",
    "AsyncGRPOTrainer": "use GRPOTrainer(config={'rollout.overlap': 'ahead'})",
    "RLOOTrainer": "use GRPOTrainer(config={'grpo.baseline': 'leave_one_out'})",
    "OnlineDPOTrainer": "use GRPOTrainer, which learns from the same rewards",
}
"""Names that scripts of TRL import -> what to write."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"rollmatch.{module}"), name)
    if name in _OF_TRL:
        raise ImportError(f"rollmatch has no {name}: {_OF_TRL[name]}")
    raise AttributeError(f"module 'rollmatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
