"""Messages for people: diagnostics, masked names, and suggestions in errors."""
