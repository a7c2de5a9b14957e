#!/usr/bin/env bash
# Start the learner: scripts/train.sh config=run.yaml gpus=3 [log_level=debug] [-- rollmatch train's options]
exec "$(dirname "$0")/with_equals" train "$@"
