"""Worker side: the user API, the training step, the local launcher and `psctl`."""
