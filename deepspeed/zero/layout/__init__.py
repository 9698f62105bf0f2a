"""Which element of the training state is where. Moves no tensor."""
