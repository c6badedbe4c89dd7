"""The HTTP server and its engine process: API, metrics, supervision. No torch."""
