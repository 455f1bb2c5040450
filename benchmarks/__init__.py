"""What LimitGate costs, measured on the machine at hand."""
