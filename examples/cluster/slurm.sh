#!/bin/bash
# A recipe on two nodes of eight GPUs each, as a SLURM job: sbatch examples/cluster/slurm.sh
#
# Each node runs one torchrun, which starts a process for every GPU. The model, the data and kvcal must be there on every
# node, under the same path. OUT is read and written on the first node alone. A job that is stopped, by its time limit or
# because a node was lost, resumes: submit it again, with any number of nodes.
#SBATCH --job-name=kvcal
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@60
set -euo pipefail

MODEL=${MODEL:?a folder or a hub id}
DATA=${DATA:?a text, JSONL or parquet file}
OUT=${OUT:-$PWD/artifacts/cluster}
RECIPE=${RECIPE:-default}

# The first node of the job is where the others meet.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# On nodes with several networks, name the one that connects them: export GLOO_SOCKET_IFNAME=ib0
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_PER_NODE))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node="$SLURM_GPUS_PER_NODE" \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$first:29500" \
    -m kvcal run "$RECIPE" --model "$MODEL" --data "$DATA" --out "$OUT"
