"""HTTP workers: further processes that receive requests, format outputs and send responses.

The server's process keeps all state: engines, queue, traces, costs, adapters. It accepts connections
and hands each to a worker (pool.py). A worker runs the endpoints that generate text, and sends the
engine requests to the server's process (remote.py, broker.py); it forwards all other paths to the
server's own HTTP server on a private socket (forward.py).
"""
