"""User interface of ZeRO, and the access of engines and checkpoints to the training state."""
