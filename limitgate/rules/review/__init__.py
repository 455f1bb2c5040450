"""What is odd about rules, though no mistake: found at start, and by ``limitgate check``."""
