"""The best settings for a load and a promise: searched with the simulator, the best measured."""
