"""Model inputs before the target: images and videos from any source, chat messages, and the processor that encodes them.

Does not own: embeddings, positions or any other tensor of the target (sage.targets).
"""
