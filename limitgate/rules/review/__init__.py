"""What is odd about rules, though no mistake: found by ``limitgate check``."""
