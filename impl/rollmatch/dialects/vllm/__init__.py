"""Stock `vllm serve` with its RL routes."""
