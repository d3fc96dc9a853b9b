"""The coordinator and its client: no socket, no process."""
