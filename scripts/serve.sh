#!/usr/bin/env bash
# Start a rollout server: scripts/serve.sh config=run.yaml gpus=0,1,2 [log_level=debug] [server=0] [CONDA_ENV=ms] [-- rollmatch serve's options]
exec "$(dirname "$0")/with_equals" serve "$@"
