"""Metrics and health of a relay over HTTP, in a process of their own.

figures      the metrics, made from the relay's status
source       asks the relay for its status, at most once a second
server       answers GET /metrics, /live and /ready within limits
__main__     the process, which a relay starts and keeps running (`supervisor`)
"""
