"""The SEQPACKET socket over which file descriptors pass on one host."""
