#!/usr/bin/env bash
# flowrl on several machines under Slurm: one task a machine, and in it accelerate's launcher, which
# starts a process for each of its GPUs.
#
#   sbatch scripts/launch/slurm.sh configs/papers/flow_grpo_flux.yaml --folder runs/flux
#
# A job that is to end (time limit, preemption) gets SIGTERM two minutes before: the run saves and
# stops, and `sbatch scripts/launch/slurm.sh --resume runs/flux` goes on with it.
#SBATCH --job-name=flowrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=slurm-%j.out
set -euo pipefail

if [ $# -eq 0 ]; then
  echo "usage: sbatch $0 CONFIG [--folder RUN] [--train.lr 1e-4 ...] | --resume RUN" >&2
  exit 2
fi

export ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-configs/accelerate/fsdp2_nodes.yaml}
export GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export NODES=${SLURM_NNODES:-1}
export MAIN_ADDRESS=${MAIN_ADDRESS:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
# not always the same one: two jobs may share a machine
export MAIN_PORT=${MAIN_PORT:-$((20000 + SLURM_JOB_ID % 20000))}

# how long processes may take to save once they are told to end; by default 30 s, then they are killed
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# shellcheck disable=SC2016  # each task fills in its own SLURM_NODEID
${SRUN:-srun --kill-on-bad-exit=1} bash -c '
  exec accelerate launch \
    --config_file "$ACCELERATE_CONFIG" \
    --num_machines "$NODES" \
    --num_processes "$((NODES * GPUS_PER_NODE))" \
    --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_ADDRESS" \
    --main_process_port "$MAIN_PORT" \
    -m flowrl train "$@"
' flowrl "$@"
