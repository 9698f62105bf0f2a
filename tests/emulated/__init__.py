"""An emulated CUDA device with NCCL's rules, for machines without a GPU. Nothing here is ever "run on a GPU"."""
