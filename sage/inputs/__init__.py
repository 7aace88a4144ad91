"""Everything before token ids and pixel values: images and video from any source, chat messages, the processor.

Does not own: embeddings, positions or any other tensor of the target (sage.targets).
"""
