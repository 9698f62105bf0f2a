"""User interface of ZeRO, and the view of the training state for engines and checkpoints."""
