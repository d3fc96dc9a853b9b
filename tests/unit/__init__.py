"""No socket, no process."""
