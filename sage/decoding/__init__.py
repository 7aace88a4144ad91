"""The decoding loop and its parts, from one request to text."""
