#!/usr/bin/env bash
# The same command on two processes (on GPUs: one per card). Every step sees the same images as on one.
set -euo pipefail
torchrun --standalone --nproc-per-node 2 -m vitrail train digits --recipe digits --epochs 2 --out runs/two
