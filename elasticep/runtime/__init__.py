"""What runs on a node: the daemon and its workers.

Nothing is imported here: a worker starts with `elasticep.runtime.worker` alone and needs no more
than ctypes.
"""
