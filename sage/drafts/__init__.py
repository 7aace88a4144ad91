"""Draft heads and smaller draft models: creation, loading, and sessions that draft for one request."""
