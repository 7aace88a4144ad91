"""Model inputs before the target: images and videos from any source, chat messages, and the processor that encodes them."""
