#!/usr/bin/env bash
# Start the learner: scripts/train.sh config=run.yaml gpus=3 [wait_timeout=600] [log_level=debug] [CONDA_ENV=ms] [-- rollmatch train's options]
exec "$(dirname "$0")/with_equals" train "$@"
