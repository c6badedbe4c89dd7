"""A fleet on Ray Serve, and the policies of its updates and warm pools."""
