#!/usr/bin/env bash
# The same line on every machine: torchrun joins them, and starts all again when a process dies.
#
#     HEAD=node0 NODES=2 PROCESSES=8 configs/launch/nodes.sh --config run.yaml
#
# HEAD is the name or address of one of the machines, which all can reach at PORT. Where a machine
# cannot be reached by its own name, ADDRESS says by which address.
#
# How far it was run: two of these with a process each, on one machine (tests/test_launch.py).
set -euo pipefail

exec torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "${PROCESSES:-8}" \
    --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d \
    --rdzv-id "${RUN_ID:-llm-course}" \
    --rdzv-endpoint "${HEAD:?name one of the machines, which all can reach}:${PORT:-29500}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    --no-python llm-course train "$@"
