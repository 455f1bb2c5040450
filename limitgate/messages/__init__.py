"""What LimitGate says to people: diagnoses, masked names, and the words in which errors help."""
