"""GPU kernels in Triton, which ship compiled; nothing here is imported by `import deepspeed`.

Only the modules of kernels import Triton. The host's side, the table of variants and the loader do not need it.
"""
