"""A load of requests: what is asked when, how it went, and what that says of a server or an engine."""
