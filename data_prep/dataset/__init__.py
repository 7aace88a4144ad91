"""Examples of a data set: prepared once, cached by content hash, mixed, streamed; which items were skipped and why."""
