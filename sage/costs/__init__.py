"""What passes and draft levels cost: the tables, how they are measured, and how draft probabilities are calibrated."""
