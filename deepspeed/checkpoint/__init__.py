"""Training state on disk: file names, formats and who reads what; nothing here drives training."""
