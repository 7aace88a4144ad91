"""The hand-off between training and whoever comes after: run states that survive a crash, and exports for serving engines."""
