"""Answers from OpenAI-compatible servers: requests (`client`), and those of concurrent conversations (`answers`)."""
