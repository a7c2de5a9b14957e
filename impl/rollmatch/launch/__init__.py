"""From a command to processes: torchrun, several machines, child processes, Ray."""
