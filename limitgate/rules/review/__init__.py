"""Valid but suspicious rules, which ``limitgate check`` reports."""
