"""HTTP, chat templates, metrics, and the two processes of a server. No torch."""
