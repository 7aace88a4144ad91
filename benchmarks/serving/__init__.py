"""sage-serve under load: answers compared with those of one request alone, memory, and requests that are refused."""
