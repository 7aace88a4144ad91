"""What a run leaves behind: run folders, checkpoints that survive a crash, and exports for serving engines."""
