"""What proposes tokens for the exact model to verify."""
