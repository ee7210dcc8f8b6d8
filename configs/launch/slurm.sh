#!/usr/bin/env bash
# One torchrun on each machine of a Slurm job; they meet at the first one.
#
#     sbatch configs/launch/slurm.sh --config run.yaml
#
# Two minutes before its time is over the job gets SIGTERM, saves a checkpoint and ends; the same
# line goes on from there. torchrun gives its processes 30 seconds for that: where a step and a save
# take longer, add --shutdown-timeout 110 (PyTorch 2.13 has it).
#
# How far it was run: `bash -n`, and with a fake srun and scontrol, which show what would be started
# (tests/test_launch.py). Not on a cluster.
#SBATCH --job-name=llm-course
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$HEAD:29500" \
    --no-python llm-course train "$@"
