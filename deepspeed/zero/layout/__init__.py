"""Position of each element of the training state. Moves no tensor."""
