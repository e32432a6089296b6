#!/bin/bash
# Two nodes of four ranks each, each rank a process, with Slurm: sbatch slurm.sh
#SBATCH --job-name=overlap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --distribution=block
#SBATCH --requeue
#SBATCH --signal=TERM@60
set -euo pipefail

# Nobody joins without it. Every user of the machine can read the environment of a step; a file only its owner can.
umask 077
export OVERLAP_SECRET_FILE="$SLURM_SUBMIT_DIR/.overlap-secret-$SLURM_JOB_ID"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$OVERLAP_SECRET_FILE"
trap 'rm -f "$OVERLAP_SECRET_FILE"' EXIT

export OVERLAP_STATE_DIR="$SLURM_SUBMIT_DIR/state" # what a requeued job goes on from
srun --kill-on-bad-exit=1 python train.py "$@"
