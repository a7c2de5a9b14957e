#!/bin/bash
# rollmatch on SLURM: a Ray cluster of all nodes of the job, and a run on it.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --signal=B:TERM@300
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token  # without, everybody who reaches the cluster can run code on it; the home is one that all nodes share
[ -e ~/.ray/auth_token ] || ray get-auth-token --generate > /dev/null
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port=6379 --include-dashboard=false --block &
until ray status --address "$head:6379" > /dev/null 2>&1; do sleep 2; done
if [ "$SLURM_NNODES" -gt 1 ]; then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" ray start --address="$head:6379" --block &
fi
until [ "$(ray status --address "$head:6379" | grep -c '^ 1 node_')" -ge "$SLURM_NNODES" ]; do sleep 2; done
rollmatch up run.yaml --address "$head:6379" --servers 1 --learners 8 &
run=$!
trap 'kill -TERM $run' TERM  # five minutes before the end: the learner saves
wait $run || wait $run
