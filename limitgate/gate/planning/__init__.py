"""From a request to its plan: which rules are for it, whose bucket it falls into, and what it is charged."""
