"""Messages for people."""
