"""Client libraries against real servers."""
