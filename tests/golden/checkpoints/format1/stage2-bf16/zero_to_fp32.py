#!/usr/bin/env python
"""Writes the fp32 weights of the checkpoints beside this file: python zero_to_fp32.py . OUTPUT_DIR."""

from deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
