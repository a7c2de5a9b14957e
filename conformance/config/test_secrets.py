"""Secrets of a configuration are in no file, page or message."""

from rollmatch.config import resolved_yaml


def test_secrets_are_hidden_in_the_resolved_configuration(make_with):
    config = make_with(
        "training.extra_arguments.hub_token=hf_abc",
        "custom.extra.rollout_server.vllm_engine_kwargs.hf_token=hf_def",
        "~.rollout_backend=vllm",
        "~.vllm.mode=server",
        "~.vllm.server.base_url=http://me:word@node7:8000",
        "~.vllm.server.group_port=51216",
    )
    text = resolved_yaml(config)
    assert not any(secret in text for secret in ("hf_abc", "hf_def", "me:word"))
    assert text.count("***") == 3
    assert "node7:8000" in text
