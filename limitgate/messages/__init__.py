"""What LimitGate says to people: diagnoses, mistakes of its own, and the words in which errors help."""
