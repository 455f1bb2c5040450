"""What passes between an application and its server."""
