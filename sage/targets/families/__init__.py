"""One module per model family, each a `Family`: what differs between Qwen2.5-VL, LLaVA-OneVision and those to come."""
