#!/bin/bash
# A run or a service on a Slurm allocation: Ray over all its nodes, weightlane on the first one.
#
#     sbatch --nodes=4 examples/cluster/slurm.sh train run.toml --set loop.steps=1000
#     sbatch --nodes=2 examples/cluster/slurm.sh tinker service.toml --set service.host=0.0.0.0
#
# The environment with weightlane, the model, and run.dir must have the same paths on every node. See docs/guides/clusters.md.
#SBATCH --job-name=weightlane
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD_ADDRESS
HEAD_ADDRESS=$(getent ahostsv4 "$first" | awk '{ print $1; exit }')
export RAY_PORT=${RAY_PORT:-6379}
# Ray's nodes trust each other by a token, which lies in the home directory that they share.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
[ "$RAY_AUTH_MODE" = disabled ] || ray get-auth-token --generate > /dev/null

# --kill-on-bad-exit: when the run fails, no node waits for the others until the time limit.
exec srun --kill-on-bad-exit=1 ray symmetric-run --address "$HEAD_ADDRESS:$RAY_PORT" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    weightlane "$@" --set "ray.address=$HEAD_ADDRESS:$RAY_PORT" --set "sync.host=$HEAD_ADDRESS"
