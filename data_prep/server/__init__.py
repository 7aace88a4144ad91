"""Answers from OpenAI-compatible servers, such as vLLM's.

    chat_request.py   messages with images -> body of a request; its answer
    client.py         requests: choice of the server, retries; the only module that sends HTTP requests
    answers.py        the check of the servers at the start, and answers of concurrent conversations

Neither URLs nor the key reach a file, a log or a message: a message names a server by its place in `regenerate.server`.
"""
