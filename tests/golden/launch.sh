#!/usr/bin/env bash
# run: run.yml, 2 x 8 = 16 ranks on h100-80gb
# On each of the 2 machines, in the folder of the code: bash launch/launch.sh node7:4000
# The first machine's address is the same everywhere; the output folder must be on storage that all of them share.
set -euo pipefail
export RDZV_ENDPOINT="${1:?give HOST:PORT of the first machine, the same on every machine}"
export NCCL_DEBUG=INFO  # otherwise NCCL says nothing when a link breaks
export PYTHONUNBUFFERED=1  # a line is in the log as soon as it is printed
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # otherwise a second attempt hangs: pytorch#135712
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds for the ranks to save after SIGTERM; torchrun would give them 30
export NOTE='it'"'"'s 100% $HOME $(HOME) $$ `x` "y" \'
export LR=1e-5
: "${WANDB_API_KEY:?export WANDB_API_KEY first: its value stands in no file}"
: "${HF_TOKEN:?export HF_TOKEN first: its value stands in no file}"
source .venv/bin/activate
export NOW=$(date +%s)
mkdir -p runs/lora
# When a rank dies, the agents of all machines meet again, and all ranks start again.
# Machines start minutes apart where each pulls its image first: torchrun's own timeouts are 60 s and 600 s.
exec torchrun \
  --nnodes=2 \
  --nproc_per_node=8 \
  --max_restarts=5 \
  --rdzv_backend=c10d \
  --rdzv_endpoint="$RDZV_ENDPOINT" \
  --rdzv_id=run \
  --rdzv_conf=read_timeout=300,join_timeout=1800 \
  -m axolotl.cli.train run.yml \
  --auto-resume-from-checkpoints=True \
  --output-dir=runs/lora
