"""What HTTP says of a request, and says to its client. Pure."""
