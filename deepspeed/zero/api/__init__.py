"""What users import, and what engines and checkpoints see of the training state."""
