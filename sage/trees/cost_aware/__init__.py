"""The cost-aware policy: expands and verifies what is worth its measured cost."""
