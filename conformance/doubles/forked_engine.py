"""What forked commands with an engine find done: vLLM looks at a model's class in their own process.

By itself it starts a Python for each class that it has not seen on this machine, which imports vLLM once more.
"""

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect: inspect()
