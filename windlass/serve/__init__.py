"""HTTP, chat templates, metrics, and the processes of a server. No torch."""
